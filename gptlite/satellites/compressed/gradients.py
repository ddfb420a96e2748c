"""Compressed sums of gradients with error feedback, behind FSDP2 (`parallelism.compression`).

Compressed are the sums over `dp_replicate`, if it has more than one rank, else those over `dp_shard`. So with HSDP the
sums over the shards of a replica stay dense, and those between replicas, usually on other machines, are compressed.
"""

import math
from collections.abc import Collection, Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.reduction import PREFIX
from gptlite.progress import format_bytes
from gptlite.satellites.compressed.buckets import Bucket, BucketReduction
from gptlite.satellites.compressed.codecs import Codec
from gptlite.satellites.compressed.errors import Errors, Lane, lanes, shape_over, wrapped_over
from gptlite.satellites.compressed.sums import (
    Counted,
    all_reduce,
    all_reduce_bytes,
    reduce_scatter,
    reduce_scatter_bytes,
)

KEYS = f"{PREFIX}gradients."  # of checkpoints; a 1-bit optimizer's errors are of another quantity


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
        self._axis = "dp_replicate" if self._replicas > 1 else "dp_shard"
        self._errors: dict[Bucket, Errors] = {}
        self._lanes: dict[nn.Parameter, Lane] = {}
        self._stored = True

    def bind(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        """Create the errors, zeros. Collective."""
        modules = (module for bucket in self.buckets for module in cast(nn.Module, bucket.module).modules())
        heads = (module for module in modules if getattr(module, "of_heads", False) is True)
        of_heads = {parameter for module in heads for parameter in module.parameters()}
        named = list(parameters)
        sliced = {parameter for _, parameter in named} if self._sequence else of_heads
        self._lanes = dict(lanes(named, sliced, self.mesh, self._axis))
        for bucket in self.buckets:
            rows = bucket.rows if self._replicas == 1 else 1
            self._errors[bucket] = Errors(bucket, rows, self._replicas, self.codec, self._device)

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

    def words(self, passes: int) -> str:
        """Return e.g. `int8 between 2 data ranks, with error feedback: ...`, with the bytes that this rank sends in a
        step with `passes` reduce-scatters, and those of its errors."""
        sent, dense = map(float, self.step_bytes(passes))
        shards, replicas = self.mesh.size("dp_shard"), self._replicas
        kind, count = ("replicas", replicas) if min(shards, replicas) > 1 else ("data ranks", max(shards, replicas))
        errors = format_bytes(sum(held.values.nbytes for held in self._errors.values()))
        return (
            f"{self.codec.name} between {count} {kind}, with error feedback: this rank sends {format_bytes(sent)} of "
            f"gradients per step, {sent / dense:.3g} of the {format_bytes(dense)} of fp32; errors take {errors}"
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's errors of each parameter, under `errors.gradients.<lane>.<parameter name>`, in its shape.
        If `dp_shard` is the compressed axis, they are copies, and not sharded over it."""
        tensors = {}
        for parameter, values in self._views():
            lane, shape = self._lanes[parameter], shape_over(parameter, self._axis)
            local = values.reshape(-1)[: math.prod(shape)].view(shape)
            tensors[f"{KEYS}{lane.index}.{lane.name}"] = wrapped_over(parameter, local, self._axis, self.mesh)
        return tensors

    def requested(self, stored: Collection[str]) -> dict[str, Tensor]:
        """Return tensors for the stored lanes that are this rank's: those congruent to its own modulo the number of
        lanes now. So every stored error has a rank, and if the layout is the same, it is the one that wrote it."""
        stored = [key for key in stored if key.startswith(KEYS)]
        self._stored = bool(stored)
        indices: dict[str, list[int]] = {}
        for key in stored:
            lane, _, name = key.removeprefix(KEYS).partition(".")
            indices.setdefault(name, []).append(int(lane))
        tensors = {}
        for parameter, lane in self._lanes.items():
            for index in indices.get(lane.name, []):
                if index % lane.count == lane.index:
                    local = torch.empty(shape_over(parameter, self._axis), device=self._device)
                    tensors[f"{KEYS}{index}.{lane.name}"] = wrapped_over(parameter, local, self._axis, self.mesh)
        return tensors

    def take(self, tensors: dict[str, Tensor]) -> list[str]:
        """Set the errors to the sums of the lanes. Returns a note if the checkpoint had none."""
        loaded: dict[tuple[str, int], Tensor] = {}
        counts = {lane.name: lane.count for lane in self._lanes.values()}
        for key in sorted(tensors, key=lambda key: int(key.removeprefix(KEYS).partition(".")[0])):
            index, _, name = key.removeprefix(KEYS).partition(".")
            local = local_tensor(tensors[key])
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
