"""ZeRO++ behind FSDP2: gathers of weights and sums of gradients that send fewer bytes between nodes."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.buckets import Bucket, BucketReduction
from gptlite.satellites.compressed.codecs import Codec
from gptlite.satellites.compressed.sums import reduce_scatter
from gptlite.satellites.zeropp.gathers import Gather
from gptlite.satellites.zeropp.nodes import Nodes
from gptlite.satellites.zeropp.wire import Sent, Shards


class ZeroppReduction(BucketReduction):
    """Gathers and sums of ZeRO++. `weights` and `gradients`: None for dense ones."""

    def __init__(
        self, mesh: Mesh, nodes: Nodes, weights: Codec | None, gradients: Codec | None, secondary: bool
    ) -> None:
        super().__init__(mesh)
        self.nodes, self.weights, self.gradients, self._secondary = nodes, weights, gradients, secondary
        self.gathers: dict[Bucket, Gather] = {}

    def attach(self, module: FSDPModule) -> None:
        """Replace the gathers and sums of a module that is sharded along `dp_shard` alone."""
        super().attach(module)
        bucket = self.attached(module)
        if bucket is None:
            return
        if bucket not in self.gathers:
            self.gathers[bucket] = Gather(bucket.group, self.weights, self.nodes, self._secondary)
        if self.weights is not None or self._secondary:
            module.set_custom_all_gather(self.gathers[bucket])  # type: ignore[arg-type]

    def scatter(self, bucket: Bucket, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Sum [rows * n] over the ranks that shard the bucket, and write this rank's row [n] to `out`.

        In two hops, qgZ of ZeRO++: in its node a rank sums the rows of all ranks that have its place in their nodes,
        and then with those ranks its own row. Both hops send blocks of the codec; what a rank adds itself is exact.
        """
        if self.gradients is None:
            super().scatter(bucket, out, flat, group)
            return
        codec, nodes = self.gradients, self.nodes
        layout = BlockLayout(tuple(bucket.sizes), codec.width, bucket.rows)
        x = layout.pack(bucket.row(flat))
        if nodes.inside is not None:
            by_place = x.view(nodes.count, nodes.size, layout.blocks, codec.width).transpose(0, 1)
            x = reduce_scatter(by_place.reshape(nodes.size, -1, codec.width), None, codec, nodes.inside)
        if nodes.across is not None:
            x = reduce_scatter(x.view(nodes.count, layout.blocks, codec.width), None, codec, nodes.across)
        out.copy_(replace(layout, rows=1).unpack(x)[0])

    def step_bytes(self, passes: int, gathered_itemsize: int, reduced_itemsize: int) -> Sent:
        """Return the bytes that this rank sends along `dp_shard` in a step of so many micro-batches, which gathers
        parameters and reduces dense gradients in elements of these sizes."""
        total = Sent()
        for bucket, gather in self.gathers.items():
            shards = Shards(tuple(gather.group.sizes), self.nodes.count, self.nodes.size)
            dense = self.weights is None and not self._secondary
            once = shards.dense(gathered_itemsize) if dense else shards.gather(self.weights, gathered_itemsize)
            total += once * (2 if gather.refetches else 1)
            if gather.keeps:
                total += shards.gather_inside(gathered_itemsize)
            trained = replace(shards, sizes=tuple(bucket.sizes))
            total += trained.two_hops(self.gradients) if self.gradients else trained.dense(reduced_itemsize)
        return total * passes
