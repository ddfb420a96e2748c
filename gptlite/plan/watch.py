"""Recording of one rank's allocations, communication and ops at torch's dispatcher.

Memory is counted by storages: when a storage is first seen, resized, or no longer referenced. Temporary memory inside
an op is not seen, except for the workspaces of our kernels and gloo's copies.
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
from gptlite.plan.profile import Op
from gptlite.plan.workload import Transfer

# Collectives of torch.distributed, by their names at the dispatcher.
KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
MESSAGES = ("send", "recv")
GLOO_COPIES = ("all_gather", "reduce_scatter")  # gloo runs them in its own buffers, as large as the whole tensor
ANSWER = 1  # result of every `.item()`: pipeline stages check that they agree, and 1 means yes


class Change(NamedTuple):
    """Bytes that a storage allocates, or frees if negative. Storages are numbered."""

    number: int
    size: int


class Watch(TorchDispatchMode):
    """A dispatch mode that records this rank's memory changes, ops and transfers in `log`, in order.

    phase: forward, backward or step, the phase of recorded transfers. world: transfers are counted as of all ranks,
    even if an axis has as many. counted: the device whose tensors are counted, standing for `device`.
    """

    def __init__(self, mesh: Mesh, device: str, counted: str = "cpu") -> None:
        super().__init__()
        self.log: list[Change | Op | Transfer] = []
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
            return NotImplemented  # a DTensor runs ops on its local tensors, which are dispatched here in turn
        if func is torch.ops.prim.device.default:
            return func(*args)  # a query: computes and allocates nothing
        if func is torch.ops.aten._local_scalar_dense.default:
            return ANSWER
        moment = self._transferred(func._opname, args) if func.namespace == "c10d" else moment_bytes(func, args)
        if func is torch.ops.aten.add.Tensor and is_last_sum(args[0]):
            func = torch.ops.aten.add_.Tensor  # autograd adds in place if tensors have data
        out = func(*args, **(kwargs or {}))
        if (op := op_of(func, args, out)) is not None:
            self.log.append(op)
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.device.type == self._counted:
                storage = each.untyped_storage()
                if storage._cdata not in self._storages:
                    self._known(storage, storage.nbytes())
        if moment:  # memory that is allocated and freed within the op
            self.log += [Change(self._count, moment), Change(self._count, -moment)]
            self._count += 1
        return out

    def leave_out(self, *tensors: Tensor) -> None:
        """Exclude the memory of tensors from the count."""
        for tensor in tensors:
            self._known(tensor.untyped_storage(), 0)

    def held(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return the bytes of the storages of local tensors, by number, of those that count and hold memory."""
        found = (self._storages.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return {entry[0]: entry[1] for entry in found if entry is not None and entry[1]}

    def sent(self, group: dist.ProcessGroup, kind: str, payload: int) -> None:
        """Record one transfer of this phase."""
        axis = "world" if self.world else self._axes.get(group.group_name, "world")
        ranks = 2 if kind in MESSAGES else group.size()
        self.log.append(Transfer(axis, kind, ranks, float(payload), 1, self.phase))

    def _transferred(self, name: str, args: Any) -> int:
        """Record a collective, and return the temporary memory that it needs."""
        kind = KINDS.get(name)
        if kind is None or (kind in MESSAGES and self.phase != "step"):
            return 0  # messages of a pass are recorded by the pipeline's stage or the collective that sends them
        whole = args[1] if kind == "reduce_scatter" else args[0]
        payload = sum(tensor.nbytes for tensor in (whole if isinstance(whole, list) else [whole]))
        # The process group follows the tensors.
        self.sent(dist.ProcessGroup.unbox(args[2 if kind in GLOO_COPIES else 1]), kind, payload)
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
