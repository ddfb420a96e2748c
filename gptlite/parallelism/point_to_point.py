"""All-gather and reduce-scatter with pairwise messages, for FSDP2 over gloo.

gloo implements reduce-scatter as a full all-reduce, and copies all-gathered data once more. Over two ranks, pairwise
messages are at least twice as fast (docs/benchmarks_training.md). Sums are taken in rank order.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a message buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class PairwiseAllGather(_Allocate):
    """All-gather of input_tensor [n] into output_tensor [ranks * n]. The input may be a view of the output."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        parts = output_tensor.view(group.size(), -1)
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        _exchange([(peer, mine, parts[peer]) for peer in _peers(group)], group)


class PairwiseReduceScatter(_Allocate):
    """Reduce-scatter of input_tensor [ranks * n] into output_tensor [n], this rank's part of the sum."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        parts = input_tensor.view(group.size(), -1)
        received = {peer: torch.empty_like(output_tensor) for peer in _peers(group)}
        _exchange([(peer, parts[peer], received[peer]) for peer in received], group)
        received[group.rank()] = parts[group.rank()]
        # Summed in rank order, so that the result does not depend on the order of arrival.
        torch.add(received[0], received[1], out=output_tensor)
        for rank in range(2, group.size()):
            output_tensor.add_(received[rank])


def _peers(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks, starting with the next higher one, to keep the ranks from all sending to the same rank
    first."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _exchange(messages: Sequence[tuple[int, Tensor, Tensor]], group: dist.ProcessGroup) -> None:
    """Send to and receive from all peers concurrently."""
    works = [dist.isend(out, group=group, group_dst=peer) for peer, out, _ in messages]
    works += [dist.irecv(into, group=group, group_src=peer) for peer, _, into in messages]
    for work in works:
        assert work is not None
        work.wait()
