"""Recording of one rank's allocations, communication and ops at torch's dispatcher, with the cost of each op.

Memory is counted by storage: a change is recorded when a storage is first seen, resized, or no longer referenced.
Temporary memory inside an op is not recorded, except for gloo's copies, the workspaces of our kernels and, on a CPU,
what oneDNN allocates (`workspace.py`).

An op's cost follows from the shapes of its arguments. A multiplication with an addition counts as two FLOPs. Causal
attention computes half of its scores. A convolution counts as the product of its filters and the patches under them.
Other ops cost their bytes, and the FLOPs that torch.utils.flop_counter has for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from gptlite.models.parallelize import is_kept
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.plan.segments import ATTENTION, MATMUL, MOVE, Op
from gptlite.satellites.plan.workload import Transfer
from gptlite.satellites.plan.workspace import FILTERS, is_measured, tape_of, tensors_of, workspace_bytes
from gptlite.torch_private.dispatch import TorchDispatchMode
from gptlite.torch_private.recording import (
    ALL_GATHER,
    CPU_FLASH_ATTENTION,
    CPU_FLASH_ATTENTION_BACKWARD,
    LOCAL_SCALAR,
    REDUCE_SCATTER,
    SCALED_MM,
    WITHOUT_COPY,
    op_name,
    op_schema,
    storage_key,
)
from gptlite.torch_private.simulation import held_messages, is_last_sum, shapes_unseen, watched_resizes

# Collectives of torch.distributed, by their names at the dispatcher.
KINDS = {
    "allreduce_": "all_reduce",
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
MESSAGES = ("send", "recv")
WITH_INPUT = ("all_gather", "reduce_scatter", "all_to_all")  # take an output and an input, then the group
GLOO_COPIES = ("all_gather", "reduce_scatter")  # gloo runs them in its own buffers, as large as the whole tensor
ANSWER = 1  # result of every `.item()`, as tensors have no values; 1 passes the pipeline stages' consistency check
NOTHING = {  # ops that compute nothing
    *("detach", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "lift_fresh", "device"),
    *("resize_", "set_", op_name(LOCAL_SCALAR), *WITHOUT_COPY),
}
LOOKUPS = {"embedding", "index", "gather", "index_select"}  # read as much of their first argument as they write
WRITES = {"copy_", "zero_", "fill_"}  # overwrite their first argument without reading it
SILENT = ("c10d", "_c10d_functional", "prim")  # namespaces whose ops have no cost; collectives are transfers instead
# Index of the left factor among the arguments; the right one follows it.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, SCALED_MM: 0, "weight_gradient": 0, "grouped_product": 0}
SCORES = {  # index of the queries; the keys follow them, or are packed with them
    CPU_FLASH_ATTENTION: 0,
    CPU_FLASH_ATTENTION_BACKWARD: 1,
    "attention": 0,
    "attention_backward": 3,
    "attention_packed": 0,
    "attention_packed_backward": 3,
}


class Change(NamedTuple):
    """Bytes (`size`) that the storage with a `number` allocates, or frees if negative."""

    number: int
    size: int


class OpRecorder(TorchDispatchMode):
    """A dispatch mode that records this rank's memory changes, ops and transfers in `log`, in order.

    `phase`: phase that recorded transfers get: forward, backward or step. `world`: if True, transfers are attributed to
    the world, even if an axis spans all ranks. `device`: type of the device that is simulated. `counted`: type of the
    device of the tensors whose memory is counted. `ranks`: ranks that share this machine's cores, if it is a CPU.
    """

    def __init__(self, mesh: Mesh, device: str, ranks: int, counted: str = "cpu") -> None:
        super().__init__()
        self.log: list[Change | Op | Transfer] = []
        self.phase, self.world = "step", False
        self._counted = counted
        # Axes over the same ranks may share a group, whose transfers are attributed to the first such axis.
        groups = reversed((mesh.groups() | mesh.expert_groups()).items())
        self._axes = {group.group_name: axis for axis, group in groups}
        self._experts = mesh.folded_groups[EXPERT].group_name if mesh.size(EXPERT) > 1 else None
        self._storages: dict[int, tuple[int, int, Any]] = {}  # number, bytes and a weak reference, by address
        self._count = 0
        self._copied = GLOO_COPIES if device == "cpu" else ()
        self._threads = max(1, torch.get_num_threads() // ranks) if device == "cpu" else 0
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
        if func is LOCAL_SCALAR:
            return ANSWER
        moment = self._transferred(op_name(func), args) if func.namespace == "c10d" else 0
        if func is torch.ops.aten.add.Tensor and is_last_sum(args[0]):
            func = torch.ops.aten.add_.Tensor  # autograd adds in place if tensors have data
        out = func(*args, **(kwargs or {}))
        moment = moment or workspace_bytes(func, args)
        if self._threads and is_measured(func, args):
            self._replay(tape_of(func, args, out, self._threads), out)
        if (op := op_of(func, args, out)) is not None:
            self.log.append(op)
        for each in tensors_of(out):
            if each.device.type == self._counted:
                storage = each.untyped_storage()
                if storage_key(storage) not in self._storages:
                    self._known(storage, storage.nbytes())
        if moment:  # memory that is allocated and freed within the op
            self.log += [Change(self._count, moment), Change(self._count, -moment)]
            self._count += 1
        return out

    def _replay(self, tape: list[tuple[int, int]], out: Any) -> None:
        """Record what an op has allocated and freed, its results among it, in order. See `tape_of`."""
        results, first = [each.untyped_storage() for each in tensors_of(out)], self._count
        self._count += len(tape)
        for size, place in tape:
            if place < 0:
                self.log.append(Change(first - place - 1, size))
            elif storage_key(results[place]) not in self._storages:
                self._known(results[place], results[place].nbytes())

    def leave_out(self, *tensors: Tensor) -> None:
        """Exclude the memory of some tensors from the count."""
        for tensor in tensors:
            self._known(tensor.untyped_storage(), 0)

    def held(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return the bytes of the storages of local tensors, keyed by number, without excluded or empty storages."""
        found = (self._storages.get(storage_key(tensor.untyped_storage())) for tensor in tensors)
        return {entry[0]: entry[1] for entry in found if entry is not None and entry[1]}

    def sent(self, group: dist.ProcessGroup, kind: str, payload: int) -> None:
        """Record one transfer of the current phase. `payload` is in bytes."""
        axis = "world" if self.world else self._axes.get(group.group_name, "world")
        if kind == "all_to_all" and group.group_name == self._experts:
            axis = EXPERT
        ranks = 2 if kind in MESSAGES else group.size()
        if ranks > 1:
            self.log.append(Transfer(axis, kind, ranks, float(payload), 1, self.phase))

    def _transferred(self, name: str, args: Any) -> int:
        """Record a collective, and return the bytes of its temporary memory."""
        kind = KINDS.get(name)
        if kind is None or (kind in MESSAGES and self.phase != "step"):
            return 0  # messages of a pass are recorded where a pipeline stage or a pairwise collective sends them
        whole = args[1] if kind in ("reduce_scatter", "all_to_all") else args[0]
        payload = sum(tensor.nbytes for tensor in (whole if isinstance(whole, list) else [whole]))
        # The process group follows the tensors.
        self.sent(dist.ProcessGroup.unbox(args[2 if kind in WITH_INPUT else 1]), kind, payload)
        return payload if kind in self._copied else 0

    def _known(self, storage: torch.UntypedStorage, size: int) -> None:
        """Number a storage, and record its `size` in bytes; size 0 excludes it from the count."""
        address, number = storage_key(storage), self._count
        self._count += 1
        self._storages[address] = number, size, weakref.ref(storage, partial(self._freed, address))
        if size:
            self.log.append(Change(number, size))

    def _freed(self, address: int, _: object) -> None:
        number, size, _ = self._storages.pop(address)
        if size:
            self.log.append(Change(number, -size))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (entry := self._storages.get(storage_key(storage))) is None:
            return
        number, before, reference = entry
        now = storage.nbytes()
        if now != before:
            self._storages[storage_key(storage)] = number, now, reference
            self.log.append(Change(number, now - before))


def op_of(func: Any, args: Any, out: Any) -> Op | None:
    """Return the cost of a dispatched op; None if it computes nothing."""
    name = op_name(func)
    if name in NOTHING or func.namespace in SILENT or func.is_view:
        return None
    moved, kept = float(_moved(func, args, out)), is_kept(func)
    if name in PRODUCTS:
        batch, rows, inner, columns = _product(name, *args[PRODUCTS[name] :][:2])
        flops = 2.0 * batch * rows * inner * columns
        return Op(MATMUL, moved, flops, float(rows), float(inner), float(columns), kept)
    if name in SCORES:
        return Op(ATTENTION, moved, float(_attention(name, args)), *_heads(name, args[SCORES[name] :]), kept)
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        flops = float(formula(*args, out_val=out))
        if name not in FILTERS:
            return Op(ATTENTION, moved, flops, *_heads(name, args[1 if "backward" in name else 0 :]), kept)
        columns, *inner = args[FILTERS[name]].shape
        # Number of products: a backward pass may compute the gradients of the input, of the filters, or both.
        sums = (out[0] is not None) + (out[1] is not None) if "backward" in name else 1
        return Op(
            MATMUL, moved, flops, flops / (2.0 * sums * columns * prod(inner)), float(prod(inner)), float(columns)
        )
    return Op(MOVE, moved) if moved else None


def _product(name: str, a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Return batch, rows, inner dim and columns of the product of a [*, m, k] and b [*, k, n], or of the product of
    a [*, m] and b [*, n] that gives a weight's gradient."""
    if name == "weight_gradient":
        return 1, a.shape[-1], prod(a.shape[:-1]), b.shape[-1]
    return prod(a.shape[:-2]), a.shape[-2], a.shape[-1], b.shape[-1]


def _heads(name: str, args: Any) -> tuple[float, float, float]:
    """Return the numbers of queries, of columns of a head and of keys; 0 for those of packed documents, whose lengths
    differ. `args` begin with the queries."""
    q, *others = args
    if q.ndim < 4:  # [T, H, D]
        return 0.0, float(q.shape[-1]), 0.0
    if "packed" in name:  # [B, S, H, 3, D]
        return float(q.shape[1]), float(q.shape[-1]), float(q.shape[1])
    keys = others[0].shape[-2] if others and isinstance(others[0], Tensor) else q.shape[-2]
    return float(q.shape[-2]), float(q.shape[-1]), float(keys)


def _attention(name: str, args: Any) -> int:
    """Return the FLOPs of attention: two products forward, and five backward, which computes the scores again. Our
    attention ops are always causal, and their last argument may be a window, which leaves 2w - w² / S of S keys."""
    q, *others = args[SCORES[name] :]
    ours, keys = "flash" not in name, q.shape[1] if "packed" in name else others[0].shape[-2]
    product = 2 * prod(q.shape) // (3 if "packed" in name else 1)  # packed: [B, S, H, 3, D]
    causal = ours or any(each is True for each in others)
    window = min(others[-1], keys) if ours and isinstance(others[-1], int) and others[-1] else keys
    pairs = product * window * (2 * keys - window) // max(keys, 1)
    return (5 if name.endswith("backward") else 2) * pairs // (2 if causal else 1)


def _moved(func: Any, args: Any, out: Any) -> int:
    """Return the bytes that an op reads, writes into its arguments, and writes into new results."""
    name, schema = op_name(func), op_schema(func)
    given = zip(schema.arguments, args, strict=False)
    mutated = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    results = out if isinstance(out, list | tuple) else [out]
    new = [value for each, value in zip(schema.returns, results, strict=False) if each.alias_info is None]
    written, read = sum(_bytes([*mutated, *new])), _bytes(args)
    if name in WRITES or name in LOOKUPS:
        read = read[1:]  # a write does not read its target, and a lookup reads only the rows that it copies
    return written + sum(read) + (written if name in LOOKUPS else 0)


def _bytes(values: Any) -> list[int]:
    """Return the bytes of each tensor among `values`; the repeated elements of an expanded tensor count once."""
    return [min(prod(each.shape) * each.element_size(), each.untyped_storage().nbytes()) for each in tensors_of(values)]
