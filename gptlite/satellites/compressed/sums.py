"""Reduce-scatter and all-reduce with compressed messages and error feedback.

Each rank keeps the errors that its messages made, and adds them to its values of the next sum (Seide et al. 2014;
Karimireddy et al. 2019, arXiv:1901.09847). A chunk's rank is called its server. Its own values are summed as they are,
so the place of its own chunk in its errors is free for the error of the sums that it sends, as in 1-bit Adam
(arXiv:2102.02888). So the errors of both sides take as many numbers as the values, and in exact arithmetic

    sum of all results = sum of all ranks' values − sum of all ranks' errors

after any number of sums. The errors of a value that isn't finite are NaN from then on: keep a copy of `errors` if a
step may be skipped.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.satellites.compressed.codecs import Codec


@dataclass
class Counted:
    """Bytes of messages that this rank has sent."""

    sent: int = 0


def reduce_scatter_bytes(codec: Codec, blocks: int, ranks: int) -> int:
    """Return the bytes that a rank sends for a reduce-scatter of so many blocks per chunk."""
    return (ranks - 1) * codec.message_bytes(blocks)


def all_reduce_bytes(codec: Codec, blocks: int, ranks: int) -> int:
    """Return the bytes that a rank sends for an all-reduce of so many blocks per chunk."""
    return 2 * reduce_scatter_bytes(codec, blocks, ranks)


def reduce_scatter(
    x: Tensor,
    errors: Tensor | None,
    codec: Codec,
    group: dist.ProcessGroup,
    mask: Tensor | None = None,
    counted: Counted | None = None,
) -> Tensor:
    """Return the sum [blocks, width] of this rank's chunk over the ranks of a group, in rank order.

    x [ranks, blocks, width], fp32: the rank's values, a chunk for each rank; they are overwritten. `errors`: like x,
    updated in place, zeros at the start; None: errors are dropped. `mask`: bool, like x, False for values that are
    always zero.
    """
    own, blocks = group.rank(), x.shape[1]
    if errors is not None:
        x += errors
    sent: dict[int, Tensor] = {}
    for peer in _peers(group):
        chunk_mask = None if mask is None else mask[peer]
        sent[peer] = codec.encode(x[peer], chunk_mask)
        if errors is not None:
            torch.sub(x[peer], codec.decode(sent[peer], blocks, chunk_mask), out=errors[peer])
    if errors is not None:
        errors[own].zero_()
    received = _exchange(sent, group, counted)
    own_mask = None if mask is None else mask[own]
    total: Tensor | None = None
    for rank in range(group.size()):  # in rank order, so that the sum does not depend on the order of arrival
        term = x[own] if rank == own else codec.decode(received[rank], blocks, own_mask)
        total = term if total is None else total.add_(term)
    assert total is not None
    return total


def all_reduce(
    x: Tensor,
    errors: Tensor,
    codec: Codec,
    group: dist.ProcessGroup,
    mask: Tensor | None = None,
    counted: Counted | None = None,
) -> Tensor:
    """Replace x [ranks, blocks, width] by its sum over the ranks of a group, with equal bits on all ranks, and return
    it. The sum is also compressed, unless there is one rank.

    Arguments are those of `reduce_scatter`. The chunks are any equal split of the values, the same on all ranks.
    """
    own, blocks = group.rank(), x.shape[1]
    total = reduce_scatter(x, errors, codec, group, mask, counted)
    if group.size() == 1:
        return x
    message = codec.encode(total, None if mask is None else mask[own])
    received = _exchange(dict.fromkeys(_peers(group), message), group, counted) | {own: message}
    errors[own].copy_(total)  # before the loop, since `total` may be x[own]
    for rank in received:
        x[rank] = codec.decode(received[rank], blocks, None if mask is None else mask[rank])
    errors[own] -= x[own]
    return x


def _peers(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks, starting with the next higher one, to keep the ranks from all sending to the same rank
    first."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def _exchange(messages: dict[int, Tensor], group: dist.ProcessGroup, counted: Counted | None) -> dict[int, Tensor]:
    """Send a message to each peer, and return the peers' messages, which have the same length."""
    received = {peer: torch.empty_like(message) for peer, message in messages.items()}
    transfers = [dist.P2POp(dist.isend, each, group=group, group_peer=peer) for peer, each in messages.items()]
    transfers += [dist.P2POp(dist.irecv, each, group=group, group_peer=peer) for peer, each in received.items()]
    if counted is not None:
        counted.sent += sum(message.nbytes for message in messages.values())
    for work in dist.batch_isend_irecv(transfers) if transfers else ():  # in a batch, since NCCL needs it
        work.wait()
    return received
