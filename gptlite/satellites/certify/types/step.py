"""Training step of one rank of a world of any size, with fake tensors, whose values are typed.

The engine's own model, layout, optimizer, schedule and step run, as in the planner's simulation. Along the way, types
are held against what the step needs: complete gradients before clipping, a norm and a loss that all ranks agree on, and
parameters that stay equal where they are replicated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import Batch, Loader
from gptlite.models.model import Model
from gptlite.models.parallelize import build_passes, materialize
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.schedule_config import ConstantConfig
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.axes import DATA_AXES
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.satellites.certify.types.atoms import Atoms
from gptlite.satellites.certify.types.declared import Declarations
from gptlite.satellites.certify.types.flow import Call, Flow
from gptlite.satellites.certify.types.layers import OpHooks
from gptlite.satellites.certify.types.values import ValueType, varying
from gptlite.satellites.plan.simulate import CPU, as_on, assume_loads, mesh_of, ops_of, policy_of, zero_batch
from gptlite.satellites.plan.workload import Workload
from gptlite.satellites.samples.batch import SampleBatch
from gptlite.torch_private.distributed import forget_meshes
from gptlite.torch_private.ops import tree_leaves
from gptlite.torch_private.recording import FakeTensorMode
from gptlite.trainer import step as step_module
from gptlite.trainer.parts import build_parts, build_updates
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step


@dataclass
class Trace:
    """Record of a rank's step: its collectives in order, its faults, the parameters whose gradients it counts in
    the norm, the atoms over which each parameter is sharded, those that are trained, and what types cannot see."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counted: set[str] = field(default_factory=set)
    parameters: dict[str, int] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    holes: set[str] = field(default_factory=set)


class _Watch:
    """The step's own checks, on a rank."""

    def __init__(self, flow: Flow, mesh: Mesh, model: Model, trace: Trace) -> None:
        self.flow, self.mesh, self.model, self.trace = flow, mesh, model, trace
        self.data, self.pipeline = flow.atoms.along(*DATA_AXES), flow.atoms.along("pp")
        self.names: dict[int, str] = {}

    def types(self, parts: list[nn.Module]) -> None:
        """Type the parameters: they differ along the axes over which they are sharded, and between stages."""
        for part in parts:
            for name, parameter in self.model.named_weights(part):
                atoms = self.pipeline | self._cut(parameter)
                self.names[id(parameter)], self.trace.parameters[name] = name, atoms
                if parameter.requires_grad:
                    self.trace.trained.add(name)
                self.flow.values.set(local_tensor(parameter.detach()), varying(atoms))

    def _cut(self, parameter: Tensor) -> int:
        if not isinstance(parameter, DTensor):
            return 0
        mesh, out = parameter.device_mesh, 0
        for dim, placement in enumerate(parameter.placements):
            if mesh.size(dim) > 1 and hasattr(placement, "dim"):
                out |= self.flow.group_atoms(mesh.get_group(dim)) or 0
        return out

    def gradients(self, state: TrainState) -> None:
        """Report gradients that are not those of the global batch: called before they are clipped."""
        axes = self.flow.atoms.words
        ends = self.model.tied_copies(state.parts) if self.pipeline else ()
        for first, last in ends:
            if (first is None) != (last is None) and not self.flow.sent:
                name = self.names[id(first if last is None else last)]
                self.flow.fault(
                    f"gradient of {name}: expected I over its copies on two stages, found P; they are not added"
                )
        for part in state.parts:
            for name, parameter in self.model.named_weights(part):
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    self.flow.fault(f"{name}: no gradient at the end of the backward passes; a reduction is missing")
                    continue
                kind, wanted = self.flow.values.of(local_tensor(parameter.grad)), self.trace.parameters[name]
                local = local_tensor(parameter.grad)
                if not local.numel():
                    continue
                if left := kind.varies & ~wanted:
                    self.flow.fault(
                        f"gradient of {name}: expected R over {axes(left)}, found V; a sum over it is missing"
                    )
                # Along an axis over which ZeRO shards it, a gradient differs too, but as a shard of a sum.
                elif left := kind.unsummed & wanted & self.data & ~self._experts(parameter):
                    self.flow.fault(f"gradient of {name}: expected S over {axes(left)}, found P; it is not summed")
                elif left := wanted & self.data & ~kind.varies:
                    self.flow.fault(f"gradient of {name}: expected S over {axes(left)}, found R; it is summed twice")
        self.flow.where = "the gradient norm"

    def _experts(self, parameter: Tensor) -> int:
        """Return the atoms of the expert axis for an expert's parameter, whose gradients are not summed along it."""
        if not isinstance(parameter, DTensor) or "ep" not in (parameter.device_mesh.mesh_dim_names or ()):
            return 0
        return self.flow.atoms.along("ep")

    def whole(self, tensor: Tensor, what: str, over: int) -> None:
        """Report a value that differs between the ranks along some atoms, and must not."""
        if left := self.flow.values.of(tensor).varies & over:
            self.flow.fault(f"{what}: expected R over {self.flow.atoms.words(left)}, found V; a sum is missing")

    def updated(self, parts: list[nn.Module]) -> None:
        """Report parameters, and buffers, that differ after the update where they are copies."""
        if any(call.where == "the update" and call.kind == "all_to_all" for call in self.flow.calls):
            self.trace.holes.add("the exchange of whole matrices in the update, whose results types take as different")
            return
        for part in parts:
            for name, parameter in self.model.named_weights(part):
                local = local_tensor(parameter.detach())
                if local.numel() and (left := self.flow.values.of(local).varies & ~self.trace.parameters[name]):
                    axes = self.flow.atoms.words(left)
                    self.flow.fault(f"{name}: its copies over {axes} differ after the update")
            for name, buffer in self.model.named_buffers(part):
                if left := self.flow.values.of(local_tensor(buffer)).varies & ~self.pipeline:
                    self.flow.fault(f"{name}: its copies over {self.flow.atoms.words(left)} differ after the step")

    @contextmanager
    def watching(self, step: Step) -> Iterator[None]:
        """Context manager that watches the passes of a step, its norm and its update."""
        run, norm, update = step.passes.run, step_module.grad_norm, step_module.clip_and_step

        def passes(batches: Any, divisor: Tensor) -> list[Tensor]:
            self.whole(divisor, "the number of targets of the global batch", self.data)
            self.flow.where, self.flow.passing = "the passes", True
            losses = run(batches, divisor)
            self.flow.passing = False
            self.flow.where, self.flow.received, self.flow.sent = "the sums after the passes", None, 0
            return losses

        def counts(optimizer: Any, parameters: Any) -> Tensor:
            counted = list(parameters)
            self.trace.counted |= {self.names.get(id(each), "") for each in counted}
            return norm(optimizer, counted)

        def updates(optimizer: Any, parameters: Any, limit: float, total: Tensor, *others: Any) -> None:
            self.whole(total, "the gradient norm that clips", self.flow.atoms.world)
            self.flow.where = "the update"
            update(optimizer, parameters, limit, total, *others)

        with ExitStack() as stack:
            step.passes.run = passes  # type: ignore[method-assign]
            stack.enter_context(patch.object(step_module, "grad_norm", counts))
            stack.enter_context(patch.object(step_module, "clip_and_step", updates))
            yield


def traced(work: Workload, rank: int, declared: Declarations) -> Trace:
    """Run one step of a rank of the workload's world, and return its trace. Raises RuntimeError in a process with a
    process group."""
    forget_meshes()  # those of another rank's world would be found equal
    atoms, trace = Atoms.of(work.layout), Trace(rank)
    with mesh_of(work.layout, rank) as mesh, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # the engine compares pointers
        policy, flow = policy_of(work), Flow(atoms)
        model = Model.of(work.model, policy)
        # FSDP2's own collectives, as on GPUs, not the pairwise messages that replace them on CPUs.
        parts = build_parts(model, work.parallelism, replace(mesh, device=torch.device("cuda")), policy, ops_of(work))
        assume_loads(parts, work)
        watch, hooks = (
            _Watch(flow, mesh, model, trace),
            OpHooks(flow, declared, work.parallelism.sequence, _mixed(work)),
        )
        blocks = {name: each for part in parts for name, each in _named_blocks(model, part)}
        with FakeTensorMode(allow_non_fake_inputs=True), as_on(work.device):
            materialize(model, parts, CPU)
            tensors = *zero_batch(work), torch.zeros(work.micro_batch_size, dtype=torch.int64)
            step, state = _build(work, mesh, model, parts, tensors, flow)
            with hooks.watching(parts, blocks), watch.watching(step), flow:
                watch.types(parts)
                for each in tree_leaves(tensors):
                    flow.values.set(each, varying(watch.data))
                flow.received = _between_stages(work, atoms)
                step(state, watch.gradients)
                watch.updated(parts)
                hooks.finish()
    trace.calls, trace.faults = flow.calls, flow.faults
    trace.holes |= hooks.holes
    return trace


def _between_stages(work: Workload, atoms: Atoms) -> ValueType:
    """Return the type of what pipeline stages send to each other."""
    sliced = work.parallelism.sequence or _mixed(work)
    return varying(atoms.along("pp", *DATA_AXES) | (atoms.along("tp") if sliced else 0))


def _mixed(work: Workload) -> bool:
    """Return True if stages send values of heads with the activations, although these are the same on all ranks."""
    return bool(getattr(work.model, "value_residual", False)) and not work.parallelism.sequence


def _named_blocks(model: Model, part: nn.Module) -> list[tuple[str, nn.Module]]:
    names = {id(module): name for name, module in part.named_modules()}
    return [(names[id(block)], block) for block in model.blocks(part).values()]


def _build(
    work: Workload, mesh: Mesh, model: Model, parts: list[nn.Module], tensors: Any, flow: Flow
) -> tuple[Step, TrainState]:
    """Return the step and the state that `pretrain` would build, but without data and initial weights."""
    config, runner, count = work.parallelism, StageRunner(parts, mesh, work.parallelism), work.micro_batches

    def batch(consumed_samples: int, micro_index: int) -> Batch:
        x, targets, numbers = tensors
        return (SampleBatch if work.sample else Batch)(x, targets, numbers)

    loader: Any = SimpleNamespace(
        batch=batch, schedule=BatchSchedule(work.global_batch_size), stream=SimpleNamespace(seed=0)
    )
    loader.num_micro_batches, loader.micro_batches = count, lambda consumed_samples: count
    optimizer = build_updates(work.optimizer, model, parts, policy_of(work), ops_of(work))
    optimizer_state(optimizer)  # creates the state
    passes = build_passes(
        model,
        runner,
        config,
        micro_batches=count,
        micro_batch_size=work.micro_batch_size,
        sequence_length=work.sequence_length,
        example=None if work.sample is None else work.sample.x[0],
    )
    step = Step(mesh, passes, work.optimizer.lr, work.optimizer.clip_norm, _Stopping(mesh, flow))
    return step, TrainState(model, runner, optimizer, Schedule(ConstantConfig(), 1), cast(Loader, loader), {})


class _Stopping(Stopping):
    """Stop flags, which differ between ranks although each comes from its host."""

    def __init__(self, mesh: Mesh, flow: Flow) -> None:
        super().__init__(mesh, StopSignal())
        self._flow = flow

    def words(self) -> Tensor:
        flags = super().words()
        self._flow.values.set(flags, varying(self._flow.atoms.world))
        return flags
