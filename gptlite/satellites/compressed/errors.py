"""Errors of compressed gradients: their alignment to blocks, and their lanes in checkpoints."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gptlite.parallelism.boxes import cut_like, cuts
from gptlite.parallelism.collectives import gather_bytes
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.tensor import is_cut
from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.buckets import Bucket
from gptlite.satellites.compressed.codecs import Codec


class Errors:
    """Errors of a bucket, aligned to blocks: `values` [rows, blocks, width], fp32.

    `rows`: the ranks of `dp_shard`, or 1 if the replicas' sums are compressed, each over `chunks` ranks.
    """

    def __init__(self, bucket: Bucket, rows: int, chunks: int, codec: Codec, device: torch.device) -> None:
        self.parameters, self.sizes, self.rows = bucket.registered(), bucket.sizes, rows
        # Of the tensor ranks' shards the largest one counts, so that blocks of parameters which these ranks have copies
        # of are at the same place, and have the same server.
        self.layout = BlockLayout(tuple(map(_longest, self.parameters)), codec.width, rows, chunks)
        self.values = self.layout.new(device)

    def views(self, aligned: Tensor) -> list[Tensor]:
        """Return each parameter's values [rows, size] as a view of aligned [rows, blocks, width]."""
        flat = aligned.view(-1, self.layout.blocks * self.layout.width)
        return [flat.narrow(1, start, size) for start, size in zip(self.layout.starts, self.sizes, strict=True)]

    def pack(self, flat: Tensor) -> Tensor:
        """Return gradients [rows, sum(sizes)] as blocks, fp32."""
        aligned = self.layout.new(flat.device)
        for view, part in zip(self.views(aligned), flat.split(self.sizes, dim=1), strict=True):
            view.copy_(part)
        return aligned

    def unpack(self, aligned: Tensor) -> Tensor:
        """Return the gradients [sum(sizes)] of a row of blocks."""
        return torch.cat([view[0] for view in self.views(aligned)])


@dataclass(frozen=True)
class Lane:
    """One of the terms that add up to a parameter's gradient, and so one of as many errors: `index` of `count`."""

    name: str
    index: int
    count: int


def lanes(
    named: Sequence[tuple[str, nn.Parameter]], sliced: set[nn.Parameter], mesh: Mesh, axis: str
) -> Iterator[tuple[nn.Parameter, Lane]]:
    """Yield this rank's parameters with their lanes, if sums over `axis` are compressed. Collective.

    Terms of a gradient come from the ranks of the axis; of `sliced` parameters, if they are not sharded over the tensor
    axis, also from those of the tensor axis, and of a tied embedding from both ends of the pipeline.
    """
    for (name, parameter), (end, ends) in zip(named, _ends([name for name, _ in named], mesh), strict=True):
        index, count = mesh.coordinate(axis), mesh.size(axis)
        if parameter in sliced and not is_cut(parameter):
            index, count = index * mesh.size("tp") + mesh.coordinate("tp"), count * mesh.size("tp")
        yield parameter, Lane(name, index * ends + end, count * ends)


def shape_over(parameter: Tensor, axis: str) -> torch.Size:
    """Return the shape of this rank's part of a parameter, as it is before ZeRO divides it over `axis`."""
    shape = list(parameter.shape)
    for cut in cuts(parameter):
        if cut.axis != axis:
            shape[cut.dim] = cut.lengths(shape[cut.dim])[cut.rank]
    return torch.Size(shape)


def wrapped_over(parameter: Tensor, local: Tensor, axis: str, mesh: Mesh) -> Tensor:
    """Return a local tensor of the shape `shape_over(parameter, axis)` as a DTensor where it is sharded."""
    if axis == "dp_replicate":  # nothing is divided over it
        return cut_like(parameter, local)
    slices = [Shard(cut.dim) for cut in cuts(parameter) if cut.axis == "tp"]
    if not slices:
        return local
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh.along("tp"), slices, run_check=False, shape=shape, stride=stride)


def _ends(names: Sequence[str], mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Yield, for each of this rank's parameters, which of the pipeline's parameters of its name it is, and of how
    many."""
    own = "\n".join(names).encode()
    stages = gather_bytes(own, mesh.group("pp")) if mesh.size("pp") > 1 else [own]
    every = [Counter(stage.decode().split("\n")) for stage in stages]
    before = sum(every[: mesh.coordinate("pp")], Counter())
    for name in names:
        yield before[name], sum(each[name] for each in every)
        before[name] += 1


def _longest(parameter: Tensor) -> int:
    """Return the number of elements of the largest shard of a parameter."""
    shape = list(parameter.shape)
    for cut in cuts(parameter):
        shape[cut.dim] = cut.lengths(shape[cut.dim])[0]
    return math.prod(shape)
