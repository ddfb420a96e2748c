"""What one rank allocates, sends and computes, seen at torch's dispatcher.

Memory is counted by storages: when a tensor's memory is first seen, changes its size, or is no longer referred to.
What an op takes inside itself, for a moment, is not seen, but for our kernels' workspaces and gloo's copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.torch_private import held_messages, is_last_sum, shapes_unseen, watched_resizes
from gptlite.plan.op_costs import moment_bytes, op_of
from gptlite.plan.profile import Op, Sent

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


class Change(NamedTuple):
    """Bytes that a storage takes, or where negative gives back. Storages have numbers."""

    number: int
    size: int


class Watch(TorchDispatchMode):
    """While entered, notes in `log`, in order, this rank's changes of memory, its ops and its transfers.

    phase: forward, backward or step, which transfers count as. world: whether what is sent goes to all ranks, even
    where an axis is as long. counted: the device whose tensors are counted, `device` the one that they stand for.
    """

    def __init__(self, mesh: Mesh, device: str, counted: str = "cpu") -> None:
        super().__init__()
        self.log: list[Change | Op | Sent] = []
        self.phase, self.world = "step", False
        self._counted = counted
        self._axes = {group.group_name: axis for axis, group in mesh.groups().items()}
        self._storages: dict[int, tuple[int, int, Any]] = {}  # number, bytes and a weak reference, by address
        self._count = 0
        self._copied = GLOO_COPIES if device == "cpu" else ()
        self._open = ExitStack()

    def __enter__(self) -> Self:
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
        if (op := op_of(func, args, out)) is not None:
            self.log.append(op)
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type == self._counted:
                storage = each.untyped_storage()
                if storage._cdata not in self._storages:
                    self._known(storage, storage.nbytes())
        if moment:
            self.log += [Change(self._count, moment), Change(self._count, -moment)]
            self._count += 1
        return out

    def leave_out(self, *tensors: Tensor) -> None:
        """Memory that does not count."""
        for tensor in tensors:
            self._known(tensor.untyped_storage(), 0)

    def held(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Bytes of the storages of some local tensors, by number, as far as they count and hold memory."""
        found = (self._storages.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return {entry[0]: entry[1] for entry in found if entry is not None and entry[1]}

    def sent(self, group: dist.ProcessGroup, kind: str, payload: int) -> None:
        """Notes one transfer of this phase."""
        axis = "world" if self.world else self._axes.get(group.group_name, "world")
        self.log.append(Sent(axis, kind, 2 if kind in MESSAGES else group.size(), float(payload), self.phase))

    def _transferred(self, name: str, args: Any) -> int:
        """Notes a collective, and returns what it takes of memory for itself."""
        kind = KINDS.get(name)
        if kind is None or (kind in MESSAGES and self.phase != "step"):
            return 0  # messages of a pass belong to a pipeline's stage or a collective, which tell of them
        whole = args[1] if kind == "reduce_scatter" else args[0]
        payload = sum(tensor.nbytes for tensor in (whole if isinstance(whole, list) else [whole]))
        self.sent(dist.ProcessGroup.unbox(args[2 if kind in GLOO_COPIES else 1]), kind, payload)  # after its tensors
        return payload if kind in self._copied else 0

    def _known(self, storage: torch.UntypedStorage, size: int) -> None:
        address, number = storage._cdata, self._count
        self._count += 1
        self._storages[address] = number, size, weakref.ref(storage, partial(self._freed, address))
        if size:
            self.log.append(Change(number, size))

    def _freed(self, address: int, _: object) -> None:
        number, size, _ = self._storages.pop(address)
        if size:
            self.log.append(Change(number, -size))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (entry := self._storages.get(storage._cdata)) is None:
            return
        number, before, reference = entry
        now = storage.nbytes()
        if now != before:
            self._storages[storage._cdata] = number, now, reference
            self.log.append(Change(number, now - before))
