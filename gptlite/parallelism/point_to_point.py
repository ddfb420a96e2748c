"""FSDP2's two collectives by messages between pairs of ranks, for gloo.

gloo reduces and scatters by reducing everything everywhere, and copies what it gathers once more: over two ranks
messages took 40% and 55% of its time (docs/benchmarks.md). Sums are taken in the order of ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class PairwiseAllGather(_Allocate):
    """input_tensor [n] of each rank -> output_tensor [ranks * n]; the input may be its place in the output."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        parts = output_tensor.view(group.size(), -1)
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        _exchange([(peer, mine, parts[peer]) for peer in _peers(group)], group)


class PairwiseReduceScatter(_Allocate):
    """The sum over ranks of input_tensor [ranks * n] -> output_tensor [n], this rank's part of it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        parts = input_tensor.view(group.size(), -1)
        received = {peer: torch.empty_like(output_tensor) for peer in _peers(group)}
        _exchange([(peer, parts[peer], received[peer]) for peer in received], group)
        received[group.rank()] = parts[group.rank()]
        torch.add(received[0], received[1], out=output_tensor)
        for rank in range(2, group.size()):
            output_tensor.add_(received[rank])


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, nearest above first, so that not all send to the same one at once."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _exchange(messages: Sequence[tuple[int, Tensor, Tensor]], group: dist.ProcessGroup) -> None:
    """Sends to each peer and receives from it, all at once."""
    works = [dist.isend(out, group=group, group_dst=peer) for peer, out, _ in messages]
    works += [dist.irecv(into, group=group, group_src=peer) for peer, _, into in messages]
    for work in works:
        assert work is not None
        work.wait()
