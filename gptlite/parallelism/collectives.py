"""Collectives used outside layers."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gptlite.parallelism.boxes import ShardedDim
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.messages import decode, encode
from gptlite.torch_private.distributed import all_gather_single

T = TypeVar("T")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: Tensor, mesh: Mesh, axes: Sequence[str] | None = None, op: str = "sum") -> Tensor:
    """Reduce a tensor in place over `axes`, or over the world if None, and return it. `op` is a key of OPS."""
    if mesh.world_size == 1:
        return tensor
    if axes is None:
        dist.all_reduce(tensor, OPS[op])
        return tensor
    for axis in axes:  # there are no groups over several axes
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, OPS[op], group=mesh.group(axis))
    return tensor


def sum_over_cuts(tensors: Sequence[Tensor], cuts: Sequence[Sequence[ShardedDim]]) -> list[Tensor]:
    """Sum each tensor over the ranks along the mesh axes in its `cuts`. All tensors must have the same dtype, since the
    tensors summed along an axis are exchanged together.

    The bits of a tensor's sum do not depend on the other tensors in the call. So the copies of a tied embedding on the
    first and the last pipeline stage get equal sums, although each is summed together with different parameters.
    """
    sums = list(tensors)
    by_axis: dict[str, tuple[ShardedDim, list[int]]] = {}
    for index, each in enumerate(cuts):
        for cut in each:
            by_axis.setdefault(cut.axis, (cut, []))[1].append(index)
    for _, (cut, places) in sorted(by_axis.items()):  # sorted: all ranks must issue the collectives in the same order
        flat = torch.cat([sums[index].flatten() for index in places])
        summed = _ordered_sum(flat.to(cut.device), cut.group).to(flat.device)
        parts = summed.split([sums[index].numel() for index in places])
        for index, part in zip(places, parts, strict=True):
            sums[index] = part.view_as(sums[index])
    return sums


def _ordered_sum(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, each element in rank order. With all_reduce, the order would depend on the element's position."""
    size = group.size()
    sent = F.pad(flat, (0, -len(flat) % size))  # all_to_all_single and the gather need equal parts
    received, out = torch.empty_like(sent), torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mine, *others = received.view(size, -1).unbind()
    mine = mine.clone()
    for other in others:
        mine += other
    all_gather_single(out, mine, group=group)
    return out[: len(flat)]


def gather_objects(mesh: Mesh, value: T) -> list[T]:
    """Return every rank's value in rank order, on every rank. Values have the types of messages.py and are small."""
    return [value] if mesh.world_size == 1 else [decode(each) for each in gather_bytes(encode(value))]


def gather_bytes(own: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of every rank of a group, or of the world, in rank order, on every rank."""
    device, ranks = _device(group), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    longest = max(map(int, sizes))
    found = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(found, _tensor(own.ljust(longest), device), group=group)
    return [each.cpu().numpy().tobytes()[: int(size)] for each, size in zip(found, sizes, strict=True)]


def broadcast_bytes(own: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the bytes of rank 0 on every rank of a group, or of the world; those of other ranks do not matter."""
    device = _device(group)
    size = torch.tensor([len(own)], device=device)
    dist.broadcast(size, src=0, group=group)
    data = _tensor(own.ljust(int(size))[: int(size)], device)
    dist.broadcast(data, src=0, group=group)
    return data.cpu().numpy().tobytes()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the tensors that a group exchanges."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data) + b"\0", dtype=torch.uint8)[:-1].to(device)  # frombuffer takes no empty one


def broadcast_text(text: str) -> str:
    """Return rank 0's text on every rank."""
    return broadcast_bytes(text.encode()).decode()
