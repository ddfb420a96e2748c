"""Bytes that a rank sends for ZeRO 3 and ZeRO++, exact for messages that go from rank to rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptlite.parallelism.layout import Layout
from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.codecs import Codec
from gptlite.satellites.compressed.sums import reduce_scatter_bytes


def machine_ranks(layout: Layout, local: int) -> int:
    """Return the number of ranks along `dp_shard` that are on a machine of `local` ranks, or the largest divisor of
    their number that also divides the degree."""
    return math.gcd(max(1, local // layout.stride("dp_shard")), layout.size("dp_shard"))


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends to ranks of its own node (`inside`), and to those of other nodes (`across`)."""

    inside: int = 0
    across: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.inside + other.inside, self.across + other.across)

    def __mul__(self, times: int) -> Sent:
        return Sent(self.inside * times, self.across * times)


@dataclass(frozen=True)
class Shards:
    """A bucket whose shards have `sizes` elements of each parameter, with padding, on `nodes` nodes of `node_size`
    ranks each. The bytes are those of messages over gloo. A ring of NCCL sends as many in all, and may send a smaller
    part of dense ones between nodes."""

    sizes: tuple[int, ...]
    nodes: int
    node_size: int

    def gather(self, codec: Codec | None, itemsize: int) -> Sent:
        """Return the bytes of an all-gather between nodes and then inside them: of blocks of the codec, or of elements
        of `itemsize`."""
        message = sum(self.sizes) * itemsize
        if codec is not None:
            message = codec.message_bytes(BlockLayout(self.sizes, codec.width).blocks)
        return Sent((self.node_size - 1) * self.nodes * message, (self.nodes - 1) * message)

    def gather_inside(self, itemsize: int) -> Sent:
        """Return the bytes of an all-gather of the node's copy, which holds all ranks' shards."""
        return Sent((self.node_size - 1) * self.nodes * sum(self.sizes) * itemsize)

    def dense(self, itemsize: int) -> Sent:
        """Return the bytes of FSDP2's all-gather or reduce-scatter over all ranks."""
        message = sum(self.sizes) * itemsize
        return Sent((self.node_size - 1) * message, (self.nodes - 1) * self.node_size * message)

    def two_hops(self, codec: Codec) -> Sent:
        """Return the bytes of a reduce-scatter of the codec's blocks inside nodes, and then between them."""
        blocks = BlockLayout(self.sizes, codec.width).blocks
        inside = reduce_scatter_bytes(codec, self.nodes * blocks, self.node_size)
        return Sent(inside, reduce_scatter_bytes(codec, blocks, self.nodes))
