"""What a simulated step allocates, sends and computes, seen at torch's dispatcher.

Memory is counted by storages: when a tensor's memory is first seen, changes its size, or is no longer referred to.
What an op takes inside itself, for a moment, is not seen.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.torch_private import held_messages, is_last_sum, shapes_unseen, watched_resizes
from gptlite.plan.simulate_moments import moment_bytes
from gptlite.plan.simulate_ops import op_of

# Collectives of torch.distributed, as the dispatcher knows them.
KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
MESSAGES = ("send", "recv")
GLOO_COPIES = ("all_gather", "reduce_scatter")  # gloo does them in memory of its own, as large as the whole
ANSWER = 1  # of every question to a tensor: pipeline stages ask one another whether they agree, and 1 is yes

Sent = tuple[str, str, int, int, str]  # axis, kind, ranks, payload, phase: a Transfer but for its count
State = dict[str, set[int]]  # numbers of storages by category


class Watch(TorchDispatchMode):
    """While entered, notes every allocation, transfer and matrix product of this rank.

    `changes` are (storage's number, bytes) in order, negative where memory is given back; `labels` says with which
    change each phase of the step begins. `phase` is forward, backward or step, and sets what transfers count as.
    """

    def __init__(self, mesh: Mesh, device: str) -> None:
        super().__init__()
        self.changes: list[tuple[int, int]] = []
        self.labels: list[tuple[int, str]] = []
        self.samples: list[tuple[int, State]] = []
        self.sent: Counter[Sent] = Counter()
        self.flops = 0
        self.phase = "step"
        self.stand_in = "cpu"  # the device whose tensors are counted
        self.state: Callable[[], dict[str, list[Tensor]]] = dict  # the tensors of the model state, by category
        self._mesh = mesh
        self._axes = {group.group_name: axis for axis, group in mesh.groups().items()}
        self._world = False  # whether it is all ranks that are asked
        self._quiet = False  # whether transfers are parts of one that is counted whole
        self._storages: dict[int, tuple[int, int, Any]] = {}  # number, bytes and a weak reference, by address
        self._count = 0
        self._copied = GLOO_COPIES if device == "cpu" else ()
        self._open = ExitStack()

    def __enter__(self) -> Watch:
        for patch in (watched_resizes(self._resized), shapes_unseen(), held_messages()):
            self._open.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it does its work by ops on local tensors, which come here
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return ANSWER
        moment = self._transferred(func._opname, args) if func.namespace == "c10d" else moment_bytes(func, args)
        if func is torch.ops.aten.add.Tensor and is_last_sum(args[0]):
            func = torch.ops.aten.add_.Tensor  # as autograd does where tensors have data
        out = func(*args, **(kwargs or {}))
        self._ran(func, args, out)
        self._saw(out)
        if moment:
            self.changes += [(self._count, moment), (self._count, -moment)]
            self._count += 1
        return out

    def _ran(self, func: Any, args: Any, out: Any) -> None:
        if (op := op_of(func, args, out)) is not None:
            self.flops += int(op.flops)

    def leave_out(self, *tensors: Tensor) -> None:
        """Memory that is not the step's."""
        for tensor in tensors:
            self._known(tensor.untyped_storage(), 0)

    def label(self, name: str) -> None:
        """A phase begins."""
        self.labels.append((len(self.changes), name))

    def sample(self) -> None:
        """Notes which storages are model state now."""
        self.samples.append((len(self.changes), {name: self._numbers(held) for name, held in self.state().items()}))

    def _numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The storages of some local tensors, as far as they hold memory."""
        found = (self._storages.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return {entry[0] for entry in found if entry is not None and entry[1]}

    def count(self, axis: str, kind: str, ranks: int, payload: int) -> None:
        """Notes one transfer of this phase."""
        self.sent[axis, kind, ranks, payload, self.phase] += 1

    @contextmanager
    def during(self, phase: str, label: str = "") -> Iterator[None]:
        """Sets the phase while entered."""
        before, self.phase = self.phase, phase
        if label:
            self.label(label)
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def all_ranks(self) -> Iterator[None]:
        """What is sent while entered goes to all ranks, even where an axis is as long."""
        self._world = True
        try:
            yield
        finally:
            self._world = False

    def whole(self, kind: str, collective: Callable[..., None]) -> Callable[..., None]:
        """A collective made of messages between pairs of ranks, counted as what it does."""

        def counted(**given: Any) -> None:
            payload = _bytes(given["output_tensor" if kind == "all_gather" else "input_tensor"])
            group = given["group"]
            self.count(self._axes[group.group_name], kind, group.size(), payload)
            self._quiet = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of the addresses of tensors without data
                collective(**given)
            self._quiet = False

        return counted

    def _transferred(self, name: str, args: Any) -> int:
        """Counts a collective, and returns what it takes of memory for itself."""
        if self._quiet or name not in KINDS:
            return 0
        kind = KINDS[name]
        group = next(group for arg in args if (group := _group(arg)) is not None)
        axis = "world" if self._world else self._axes.get(group.group_name, "world")
        if kind in MESSAGES and self.phase != "step":
            return 0  # a pipeline's, which its stages tell of
        whole = args[1] if kind == "reduce_scatter" else args[0]
        payload = sum(_bytes(tensor) for tensor in (whole if isinstance(whole, list) else [whole]))
        self.count(axis, kind, 2 if kind in MESSAGES else group.size(), payload)
        return payload if kind in self._copied else 0

    def _saw(self, out: Any) -> None:
        if isinstance(out, Tensor):
            if out.device.type != self.stand_in:
                return
            storage = out.untyped_storage()
            if storage._cdata not in self._storages:
                self._known(storage, storage.nbytes())
        elif isinstance(out, list | tuple):
            for each in out:
                self._saw(each)

    def _known(self, storage: torch.UntypedStorage, size: int) -> None:
        address, number = storage._cdata, self._count
        self._count += 1
        self._storages[address] = number, size, weakref.ref(storage, partial(self._freed, address))
        if size:
            self.changes.append((number, size))

    def _freed(self, address: int, _: object) -> None:
        number, size, _ = self._storages.pop(address)
        if size:
            self.changes.append((number, -size))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (entry := self._storages.get(storage._cdata)) is None:
            return
        number, before, reference = entry
        now = storage.nbytes()
        if now != before:
            self._storages[storage._cdata] = number, now, reference
            self.changes.append((number, now - before))


def _group(value: Any) -> dist.ProcessGroup | None:
    """The process group that a dispatched collective was given, where a value is one."""
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # a reduction's kind
        return None


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
