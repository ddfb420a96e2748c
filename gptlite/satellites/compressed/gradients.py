"""Compressed sums of gradients with error feedback, behind FSDP2 (`parallelism.compression`).

Compressed are the sums over `dp_replicate`, if it has more than one rank, else those over `dp_shard`. So with HSDP the
sums over the shards of a replica stay dense, and those between replicas, usually on other machines, are compressed.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from gptlite.parallelism.boxes import cut_like, cuts, local_box
from gptlite.parallelism.collectives import gather_bytes
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.reduction import PREFIX
from gptlite.parallelism.tensor import is_cut
from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.buckets import Bucket, BucketReduction
from gptlite.satellites.compressed.codecs import Codec
from gptlite.satellites.compressed.sums import (
    Counted,
    all_reduce,
    all_reduce_bytes,
    reduce_scatter,
    reduce_scatter_bytes,
)


@dataclass(frozen=True)
class Lane:
    """One of the terms that add up to a parameter's gradient, and so one of as many errors: `index` of `count`."""

    name: str
    index: int
    count: int


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


class CompressedReduction(BucketReduction):
    """Sums of buckets in which ranks send blocks of a codec, and keep the errors for their next sum.

    `device` stores the errors. `sequence`: tensor ranks have different terms of the gradients of parameters that are
    not sharded over them, as each has a slice of the sequence. `counted` has the bytes that this rank has sent.
    """

    def __init__(self, mesh: Mesh, codec: Codec, device: torch.device, sequence: bool) -> None:
        super().__init__(mesh)
        self.codec, self.counted = codec, Counted()
        self._device, self._sequence = device, sequence
        self._replicas = mesh.size("dp_replicate")
        self._errors: dict[Bucket, Errors] = {}
        self._lanes: dict[nn.Parameter, Lane] = {}
        self._stored = True

    def bind(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        """Create the errors, zeros. Collective."""
        of_heads = {
            parameter
            for bucket in self.buckets
            for module in bucket.module.modules()
            if getattr(module, "of_heads", False) is True
            for parameter in module.parameters()
        }
        named = list(parameters)
        axis = "dp_replicate" if self._replicas > 1 else "dp_shard"
        for (name, parameter), (end, ends) in zip(named, self._ends([name for name, _ in named]), strict=True):
            index, count = self.mesh.coordinate(axis), self.mesh.size(axis)
            if (self._sequence or parameter in of_heads) and not is_cut(parameter):
                index, count = index * self.mesh.size("tp") + self.mesh.coordinate("tp"), count * self.mesh.size("tp")
            self._lanes[parameter] = Lane(name, index * ends + end, count * ends)
        for bucket in self.buckets:
            rows = bucket.rows if self._replicas == 1 else 1
            self._errors[bucket] = Errors(bucket, rows, self._replicas, self.codec, self._device)

    def _ends(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Return, for each name, which of the pipeline's parameters of this name it is, and of how many: a tied
        embedding has one on each end."""
        own = "\n".join(names).encode()
        stages = gather_bytes(own, self.mesh.group("pp")) if self.mesh.size("pp") > 1 else [own]
        every = [(rank, name) for rank, stage in enumerate(stages) for name in stage.decode().split("\n")]
        places: dict[str, list[int]] = {}
        for place, (_, name) in enumerate(every):
            places.setdefault(name, []).append(place)
        first = next((place for place, (rank, _) in enumerate(every) if rank == self.mesh.coordinate("pp")), 0)
        return [(places[name].index(first + place), len(places[name])) for place, name in enumerate(names)]

    def scatter(self, bucket: Bucket, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Sum [rows * n] over the ranks that shard the bucket, and write this rank's row [n] to `out`."""
        if self._replicas > 1:
            super().scatter(bucket, out, flat, group)
            return
        held = self._errors[bucket]
        errors = held.values.to(flat.device)
        total = reduce_scatter(held.pack(bucket.row(flat)), errors, self.codec, group, counted=self.counted)
        out.copy_(held.unpack(total))
        if errors is not held.values:
            held.values.copy_(errors)

    def sum(self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Sum this rank's row [n] in place over the ranks that hold copies of it."""
        held = self._errors[bucket]
        errors = held.values.to(flat.device)
        chunks = held.pack(bucket.row(flat)).view(self._replicas, -1, self.codec.width)
        total = all_reduce(chunks, errors.view_as(chunks), self.codec, group, counted=self.counted)
        flat.copy_(held.unpack(total))
        if errors is not held.values:
            held.values.copy_(errors)

    def step_bytes(self, passes: int) -> tuple[int, int]:
        """Return the bytes that this rank sends in a step over the compressed axis, and those that it would send of
        fp32 gradients: a ring's. `passes`: the number of reduce-scatters of a step."""
        sent = dense = 0
        for held in self._errors.values():
            blocks, n = held.layout.blocks, sum(held.sizes) * torch.float32.itemsize
            if self._replicas > 1:
                sent += all_reduce_bytes(self.codec, blocks // self._replicas, self._replicas)
                dense += 2 * (self._replicas - 1) * n // self._replicas
            else:
                sent += passes * reduce_scatter_bytes(self.codec, blocks, held.rows)
                dense += passes * (held.rows - 1) * n
        return sent, dense

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's errors of each parameter, under `errors.<lane>.<parameter name>`, in its shape. If
        `dp_shard` is the compressed axis, they are copies, and not sharded over it."""
        tensors = {}
        for parameter, values in self._views():
            lane, shape = self._lanes[parameter], self._shape(parameter)
            local = values.reshape(-1)[: math.prod(shape)].view(shape)
            tensors[f"{PREFIX}{lane.index}.{lane.name}"] = self._wrapped(parameter, local)
        return tensors

    def requested(self, stored: Collection[str]) -> dict[str, Tensor]:
        """Return tensors for the stored lanes that are this rank's: those congruent to its own modulo the number of
        lanes now. So every stored error has a rank, and if the layout is the same, it is the one that wrote it."""
        self._stored = bool(stored)
        found: dict[str, list[int]] = {}
        for key in stored:
            lane, _, name = key.removeprefix(PREFIX).partition(".")
            found.setdefault(name, []).append(int(lane))
        tensors = {}
        for parameter, lane in self._lanes.items():
            for index in found.get(lane.name, []):
                if index % lane.count == lane.index:
                    local = torch.empty(self._shape(parameter), device=self._device)
                    tensors[f"{PREFIX}{index}.{lane.name}"] = self._wrapped(parameter, local)
        return tensors

    def take(self, tensors: dict[str, Tensor]) -> list[str]:
        """Set the errors to the sums of the lanes. Returns a note if the checkpoint had none."""
        loaded: dict[tuple[str, int], Tensor] = {}
        counts = {lane.name: lane.count for lane in self._lanes.values()}
        for key in sorted(tensors, key=lambda key: int(key.split(".")[1])):
            index, _, name = key.removeprefix(PREFIX).partition(".")
            tensor = tensors[key]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            place = name, int(index) % counts[name]
            loaded[place] = loaded[place] + local if place in loaded else local
        for parameter, values in self._views():
            lane = self._lanes[parameter]
            whole = torch.zeros(values.numel(), device=values.device)
            if (local := loaded.get((lane.name, lane.index))) is not None:
                whole[: local.numel()] = local.flatten()
            values.copy_(whole.view_as(values))
        return [] if self._stored else ["the checkpoint has no compression errors; they begin at 0"]

    def _views(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return every parameter's errors [rows, size], zero-padded, as views."""
        return [
            (parameter, values)
            for held in self._errors.values()
            for parameter, values in zip(held.parameters, held.views(held.values), strict=True)
        ]

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the local shape of a parameter, or that before `dp_shard` divides it, if that is the compressed
        axis."""
        if self._replicas > 1:
            return local_box(parameter)[0]
        shape = list(parameter.shape)
        for cut in cuts(parameter):
            if cut.axis == "tp":
                shape[cut.dim] = cut.lengths(shape[cut.dim])[cut.rank]
        return tuple(shape)

    def _wrapped(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        """Return a local tensor of `_shape` as a DTensor where it is sharded."""
        if self._replicas > 1:
            return cut_like(parameter, local)
        sharded = next((cut for cut in cuts(parameter) if cut.axis == "tp"), None)
        if sharded is None:
            return local
        mesh, shape = self.mesh.along("tp"), parameter.shape
        dim = [Shard(sharded.dim)]
        return DTensor.from_local(local, mesh, dim, run_check=False, shape=shape, stride=parameter.stride())


def _longest(parameter: Tensor) -> int:
    """Return the number of elements of the largest shard of a parameter."""
    shape = list(parameter.shape)
    for cut in cuts(parameter):
        shape[cut.dim] = cut.lengths(shape[cut.dim])[0]
    return math.prod(shape)
