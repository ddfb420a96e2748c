"""Measurement of the memory of a rank's model part during a training step, by the categories of memory_report.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from gptlite.parallelism.boxes import local_tensor
from gptlite.satellites.monitor.memory_phases import AFTER, Phases
from gptlite.satellites.monitor.model_state import StateBytes, in_memory, shards_of, state_of, storage_sizes
from gptlite.torch_private.allocations import recorded_allocations
from gptlite.torch_private.fsdp import fsdp_buffers
from gptlite.torch_private.ops import tree_leaves

Allocation = tuple[int, int, int]  # nanoseconds since 1970, address, bytes (negative: freed)


@dataclass(frozen=True)
class StepBytes:
    """Peak bytes of a step: the model state when its total is largest, and the peak of everything else (`activations`),
    which may occur at a different time.

    `phases` has the peak of the total in each of memory_phases.PHASES.
    """

    state: StateBytes
    activations: int
    phases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StateSnapshot:
    """Snapshot of the model state: `held` is `{category of StateBytes: {address: bytes}}`.

    `allocated` is the total number of bytes allocated on a GPU.
    """

    time: int  # nanoseconds since 1970
    held: dict[str, dict[int, int]]
    allocated: int = 0

    @property
    def state(self) -> StateBytes:
        """Bytes of each category."""
        return StateBytes(**{category: sum(sizes.values()) for category, sizes in self.held.items()})

    def has(self, address: int, start: float, end: float) -> bool:
        """Return True if the memory at `address`, allocated at `start` and freed at `end`, was model state at the time
        of this sample."""
        return start <= self.time < end and any(address in sizes for sizes in self.held.values())


class MemoryWatch:
    """Context manager that measures one step of `micro_batches` micro-batches. Call `found` afterwards for the result.

    On a CPU it records tensor allocations with torch.profiler's recorder, which costs about 10 us each; torch.profiler
    must not run at the same time. On a GPU it reads the allocator's statistics and resets its peak.
    """

    def __init__(
        self, parts: Sequence[nn.Module], optimizer: Optimizer, device: torch.device, micro_batches: int
    ) -> None:
        self.parts, self.optimizer, self.device, self.micro_batches = parts, optimizer, device, micro_batches
        self.samples: list[StateSnapshot] = []
        self.phases, self._base = Phases(device), 0
        self._allocations: list[Allocation] = []
        self._open = ExitStack()

    def __enter__(self) -> MemoryWatch:
        for part in self.parts:
            # Model state peaks in the last micro-batch's backward pass, when the gradients of earlier ones exist. That
            # pass begins at a part's output.
            self._open.callback(part.register_forward_pre_hook(lambda *_: self.phases.begin("forward")).remove)
            self._open.callback(part.register_forward_hook(_LastBackward(self)).remove)
        self._open.callback(self.optimizer.register_step_pre_hook(lambda *_: self._updates()).remove)
        self._open.callback(self.optimizer.register_step_post_hook(lambda *_: self.phases.begin(AFTER)).remove)
        # The recorder sees only what is allocated from now on.
        self._base = sum(sum(sizes.values()) for sizes in held(self.parts, self.optimizer).values())
        self.phases.begin("forward")
        if self.device.type != "cuda":
            self._allocations = self._open.enter_context(recorded_allocations())
        return self

    def _updates(self) -> None:
        self.sample()
        self.phases.begin("update")

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def sample(self) -> None:
        """Take a snapshot of the model state."""
        allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        self.samples.append(StateSnapshot(time.time_ns(), held(self.parts, self.optimizer), allocated))

    def found(self) -> StepBytes:
        """Return the memory of the step. Raises ValueError if no step was run."""
        state = max((sample.state for sample in self.samples), key=lambda state: state.total)
        if self.device.type == "cuda":
            # A lower bound: the two peaks may be at different times.
            peak = self.phases.highest()
            beside = max(peak - state.total, *(sample.allocated - sample.state.total for sample in self.samples))
        else:
            beside = most_beside(self._allocations, self.samples)
        return StepBytes(state, max(beside, 0), self.phases.peaks(self._allocations, self._base))


def where_backward_begins(out: Any, call: Callable[[], None]) -> None:
    """Call `call` once, when the backward pass from `out` begins. `out` is a part's output: a tensor, or a pytree of
    tensors. If the backward pass is split, its weight-gradient pass does not call it again."""

    def begins(gradient: Tensor) -> None:
        hook.remove()
        call()

    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if leaves:
        hook = register_multi_grad_hook(leaves, begins, mode="any")


class _LastBackward:
    """Forward hook that samples memory at the start of the backward pass of a part's last micro-batch."""

    def __init__(self, watch: MemoryWatch) -> None:
        self.watch, self.left = watch, watch.micro_batches

    def __call__(self, part: nn.Module, inputs: object, out: object) -> None:
        where_backward_begins(out, self._begins)

    def _begins(self) -> None:
        self.watch.phases.begin("backward")
        self.left -= 1
        if self.left == 0:
            self.watch.sample()


def held(parts: Iterable[nn.Module], optimizer: Optimizer) -> dict[str, dict[int, int]]:
    """Return `{category of StateBytes: {address: bytes}}` of the distinct storages of the model state."""
    return {category: storage_sizes(tensors) for category, tensors in state_tensors(parts, optimizer).items()}


def state_tensors(parts: Iterable[nn.Module], optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Return `{category of StateBytes: local tensors}` of the model state. Some may share a storage."""
    parameters = [local_tensor(shard) for shard in shards_of(optimizer)]
    gradients = [local_tensor(shard.grad) for shard in shards_of(optimizer) if shard.grad is not None]
    for part in parts:
        gathered, unreduced = fsdp_buffers(part)
        parameters += gathered
        gradients += [local_tensor(gradient) for gradient in unreduced]
    parameters, gradients = in_memory(optimizer, parameters), in_memory(optimizer, gradients)
    return {"parameters": parameters, "gradients": gradients, "optimizer": state_of(optimizer)}


def most_beside(allocations: Iterable[Allocation], samples: Sequence[StateSnapshot]) -> int:
    """Return the peak bytes of the allocations that are not model state in any sample.

    Allocations that are never freed are left out, as no activation outlives its step. If a collective's thread releases
    a buffer, its free is not recorded, and the buffer counts as freed when its address is reused.
    """
    live: dict[int, tuple[int, int]] = {}
    changes: list[tuple[int, int]] = []
    for when, address, size in allocations:
        if address in live:
            start, before = live.pop(address)
            if not any(sample.has(address, start, when) for sample in samples):
                changes += [(start, before), (when, -before)]
        if size > 0:
            live[address] = (when, size)
    now = most = 0
    for _, change in sorted(changes):  # at equal times, frees come first
        now += change
        most = max(most, now)
    return most
