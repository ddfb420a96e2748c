"""Bytes that a rank sends for ZeRO 3 and ZeRO++, exact for messages that go from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass

from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.codecs import Codec
from gptlite.satellites.compressed.sums import reduce_scatter_bytes


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
    ranks each. With gloo the bytes below are those of the messages; a ring of NCCL sends as many in all, of which it
    may send a smaller part between nodes."""

    sizes: tuple[int, ...]
    nodes: int
    node_size: int

    def gather(self, codec: Codec | None, itemsize: int) -> Sent:
        """Return the bytes of an all-gather over all ranks: of blocks of the codec, or of elements of `itemsize`."""
        if codec is None:
            return self._to_all(sum(self.sizes) * itemsize)
        return self._to_all(codec.message_bytes(BlockLayout(self.sizes, codec.width).blocks))

    def gather_inside(self, itemsize: int) -> Sent:
        """Return the bytes of an all-gather of the node's copy, which holds all ranks' shards."""
        return Sent((self.node_size - 1) * self.nodes * sum(self.sizes) * itemsize)

    def scatter(self, itemsize: int) -> Sent:
        """Return the bytes of a reduce-scatter over all ranks."""
        return self._to_all(sum(self.sizes) * itemsize)

    def two_hops(self, codec: Codec) -> Sent:
        """Return the bytes of a reduce-scatter of the codec's blocks inside nodes, and then between them."""
        blocks = BlockLayout(self.sizes, codec.width).blocks
        inside = reduce_scatter_bytes(codec, self.nodes * blocks, self.node_size)
        return Sent(inside, reduce_scatter_bytes(codec, blocks, self.nodes))

    def _to_all(self, message: int) -> Sent:
        return Sent((self.node_size - 1) * message, (self.nodes - 1) * self.node_size * message)
