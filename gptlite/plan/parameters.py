"""The parameters that a pipeline rank holds, by what FSDP2 gathers and reduces together. No torch here.

They are those of gptlite.models.gpt.model, cut over the tensor axis as gptlite.models.parallelize cuts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import head_flops, layer_flops
from gptlite.ops.config import Attention
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages, split_layers, stages_of_rank, stages_per_rank
from gptlite.plan.workload import Workload

Alike = tuple[tuple[int, ...], bool, bool]  # layers of a rank's stages, whether the model's ends are among them


class Parameter(NamedTuple):
    """One parameter on a tensor rank: rows (its first dim, which FSDP2 cuts) of so many elements.

    `cut`: over the tensor axis; else it is whole on each of its ranks.
    """

    rows: int
    width: int
    cut: bool

    @property
    def elements(self) -> int:
        """Elements before FSDP2 cuts it."""
        return self.rows * self.width

    def shard(self, shards: int) -> int:
        """Elements of a shard, as long as the longest: FSDP2 pads the others to it."""
        return -(-self.rows // shards) * self.width


@dataclass(frozen=True)
class Stage:
    """One part of the model: its layers, each with the same parameters, and what it has beside them.

    `others` are gathered and reduced together, `block` in buckets of layers. A part that is both first and last holds
    a tied embedding once.
    """

    number: int
    layers: int
    block: tuple[Parameter, ...]
    others: tuple[Parameter, ...]
    first: bool
    last: bool

    def groups(self, bucket_layers: int) -> list[tuple[tuple[Parameter, ...], int]]:
        """What FSDP2 handles at a time, with how often there is one: the other parameters, whole buckets, the last."""
        whole, rest = divmod(self.layers, bucket_layers)
        found = [(self.others, 1), (self.block * bucket_layers, whole), (self.block * rest, 1)]
        return [(group, count) for group, count in found if group and count]

    def parameters(self) -> list[Parameter]:
        """All of them."""
        return [*self.others, *self.block * self.layers]

    def sharded(self, shards: int, others: bool = False) -> int:
        """Elements of a shard of all of them, as long as the longest, or of the `others` alone."""
        return shard_elements(self.others, shards) + (0 if others else self.layers * shard_elements(self.block, shards))


def stages(work: Workload, pp_rank: int, tp_rank: int = 0) -> list[Stage]:
    """The stages of a pipeline rank, first to last."""
    model, config = work.model, work.parallelism
    total, tensor = num_stages(config), work.layout.size("tp")
    layers = cut(work).layers
    block = block_parameters(model, tensor)
    found = []
    for number in stages_of_rank(config, pp_rank):
        first, last = number == 0, number == total - 1
        others = tuple(_others(model, tensor, tp_rank, first, last)) if first or last else ()
        found.append(Stage(number, len(layers[number]), block, others, first, last))
    return found


@dataclass(frozen=True)
class Cut:
    """How a pipeline divides a model: the layers of each stage, the stages of each rank, the kind of each rank, and the
    first rank of each kind. Ranks of a kind hold as many layers and the same ends, so they do the same work."""

    layers: tuple[range, ...]
    stages: tuple[tuple[int, ...], ...]
    kinds: tuple[Alike, ...]
    first: dict[Alike, int]


def cut(work: Workload) -> Cut:
    """How the pipeline of a layout divides its model."""
    model, config = work.model, work.parallelism
    costs = layer_flops(model), head_flops(model)
    return _cut(model.num_layers, config.pipeline, stages_per_rank(config), config.schedule, *costs)


@lru_cache(maxsize=1024)
def _cut(num_layers: int, pipeline: int, virtual: int, schedule: str, layer_cost: float, head_cost: float) -> Cut:
    config = ParallelismConfig(pipeline=pipeline, schedule=schedule, virtual_stages=virtual)
    # As model/parallelize.py cuts them.
    layers = tuple(split_layers(num_layers, num_stages(config), layer_cost, head_cost))
    held = tuple(tuple(stages_of_rank(config, rank)) for rank in range(pipeline))
    kinds = tuple((tuple(len(layers[stage]) for stage in its), 0 in its, len(layers) - 1 in its) for its in held)
    return Cut(layers, held, kinds, {kind: kinds.index(kind) for kind in kinds})


def block_parameters(model: GPTConfig, tensor: int) -> tuple[Parameter, ...]:
    """Of one layer, on each of the ranks that share it."""
    width, inner = model.d_model, model.ffn_size
    matrices = [
        (Parameter(3 * width // tensor, width, True), Parameter(3 * width // tensor, 1, True)),
        (Parameter(width, width // tensor, True), Parameter(width, 1, False)),
        (Parameter(inner // tensor, width, True), Parameter(inner // tensor, 1, True)),
        (Parameter(width, inner // tensor, True), Parameter(width, 1, False)),
    ]
    norms = [(Parameter(width, 1, False), Parameter(width, 1, False))] * 2
    return tuple(parameter for weight, bias in (*matrices, *norms) for parameter in (weight, bias)[: 1 + model.bias])


def table_rows(model: GPTConfig, tensor: int, tp_rank: int) -> int:
    """Rows of the embedding table on a tensor rank, which may hold fewer than the first, or none."""
    longest = -(-model.padded_vocab_size // tensor)
    return max(0, min(longest, model.padded_vocab_size - tp_rank * longest))


def _others(model: GPTConfig, tensor: int, tp_rank: int, first: bool, last: bool) -> Iterable[Parameter]:
    width, table = model.d_model, Parameter(table_rows(model, tensor, tp_rank), model.d_model, tensor > 1)
    if first:
        yield table
        yield Parameter(model.sequence_length, width, False)
    if last:
        yield from [Parameter(width, 1, False)] * (1 + model.bias)
        if not (first and model.tied_embeddings):
            yield table


def padded(parameters: Iterable[Parameter], shards: int) -> int:
    """Elements of a gathered group: equal shards of each parameter, whatever their padding."""
    return shards * shard_elements(tuple(parameters), shards)


@lru_cache(maxsize=1024)
def shard_elements(parameters: tuple[Parameter, ...], shards: int) -> int:
    """Elements of a shard of each parameter, as long as the longest."""
    return sum(parameter.shard(shards) for parameter in parameters)


def fused(work: Workload) -> bool:
    """Whether our kernels run beside the attention: matmul attention is what `ops` takes where there are none."""
    return work.attention is not Attention.matmul
