"""The parameters that a pipeline rank holds, by what FSDP2 gathers and reduces together.

They are those of the model that a run builds, cut over the tensor axis as a run cuts it; see `probe.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from gptlite.models.config import ModelConfig
from gptlite.models.spec import spec_of
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages, split_layers, stages_of_rank, stages_per_rank
from gptlite.plan.workload import Workload

BLOCKS = 2  # of a model that is asked: the last one is like any other
Alike = tuple[tuple[int, ...], bool, bool]  # layers of a rank's stages, whether the model's ends are among them


class Parameter(NamedTuple):
    """One parameter on a tensor rank: rows (its first dim, which FSDP2 cuts) of so many elements.

    `cut`: over the tensor axis; else it is whole on each of its ranks. `tied`: one with another of the whole model.
    """

    rows: int
    width: int
    cut: bool
    tied: bool = False

    @property
    def elements(self) -> int:
        """Elements before FSDP2 cuts it."""
        return self.rows * self.width

    def shard(self, shards: int) -> int:
        """Elements of a shard, as long as the longest: FSDP2 pads the others to it."""
        return -(-self.rows // shards) * self.width


@dataclass(frozen=True)
class Inventory:
    """A model's parameters on a rank of the tensor axis: of one block, and of what is beside the blocks in the whole,
    in a pipeline's first part and in its last. `blocks`: how many the model had that was asked."""

    blocks: int
    block: tuple[Parameter, ...]
    whole: tuple[Parameter, ...]
    first: tuple[Parameter, ...]
    last: tuple[Parameter, ...]


@dataclass(frozen=True)
class Stage:
    """One part of the model: its layers, each with the same parameters, and what it has beside them.

    `others` are gathered and reduced together, `block` in buckets of layers. A part that is both first and last holds
    a tied parameter once.
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
    config, total = work.parallelism, num_stages(work.parallelism)
    layers, its = cut(work).layers, inventory(work.model, work.layout.size("tp"), tp_rank)
    found = []
    for number in stages_of_rank(config, pp_rank):
        first, last = number == 0, number == total - 1
        others = {(True, True): its.whole, (True, False): its.first, (False, True): its.last}.get((first, last), ())
        found.append(Stage(number, len(layers[number]), its.block, others, first, last))
    return found


def copies(held: list[Stage]) -> list[Parameter]:
    """Tied parameters of a rank's stages that another rank has a copy of."""
    ends = [stage for stage in held if stage.first or stage.last]
    whole = len(ends) != 1 or ends[0].first == ends[0].last
    return [] if whole else [each for each in ends[0].others if each.tied]


def inventory(model: ModelConfig, tensor: int, tp_rank: int = 0) -> Inventory:
    """The parameters of a model of any depth."""
    few = with_blocks(model, BLOCKS)
    return _inventory(_Shape(few, repr(few)), tensor, tp_rank)


@dataclass(frozen=True)
class _Shape:
    """A configuration that is compared by its words, since it is no key by itself."""

    model: ModelConfig = field(compare=False)
    words: str


@lru_cache(maxsize=256)
def _inventory(shape: _Shape, tensor: int, tp_rank: int) -> Inventory:
    from gptlite.plan.probe import take_inventory

    return take_inventory(shape.model, tensor, tp_rank)


def with_blocks(model: Any, blocks: int) -> Any:
    """A model's configuration with so many blocks; as it is where it does not say how many it has."""
    spec = spec_of(model)
    return model if spec.num_blocks(model) is None else replace(model, **{spec.blocks_key: blocks})


def num_parameters(model: ModelConfig) -> int:
    """All parameters of the whole model."""
    its = inventory(model, 1)
    return shard_elements(its.whole, 1) + num_blocks(model) * shard_elements(its.block, 1)


def num_blocks(model: ModelConfig) -> int:
    """How many blocks a model has."""
    return spec_of(model).num_blocks(model) or inventory(model, 1).blocks


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
    config, spec = work.parallelism, spec_of(work.model)
    costs = spec.flops(work.model, spec.max_length(work.model) or 1) or (1, 0)  # as Model.stage_blocks has it
    return _cut(num_blocks(work.model), config.pipeline, stages_per_rank(config), config.schedule, *costs)


@lru_cache(maxsize=1024)
def _cut(num_layers: int, pipeline: int, virtual: int, schedule: str, layer_cost: float, head_cost: float) -> Cut:
    config = ParallelismConfig(pipeline=pipeline, schedule=schedule, virtual_stages=virtual)
    layers = tuple(split_layers(num_layers, num_stages(config), layer_cost, head_cost))
    held = tuple(tuple(stages_of_rank(config, rank)) for rank in range(pipeline))
    kinds = tuple((tuple(len(layers[stage]) for stage in its), 0 in its, len(layers) - 1 in its) for its in held)
    return Cut(layers, held, kinds, {kind: kinds.index(kind) for kind in kinds})


def padded(parameters: Iterable[Parameter], shards: int) -> int:
    """Elements of a gathered group: equal shards of each parameter, whatever their padding."""
    return shards * shard_elements(tuple(parameters), shards)


@lru_cache(maxsize=1024)
def shard_elements(parameters: tuple[Parameter, ...], shards: int) -> int:
    """Elements of a shard of each parameter, as long as the longest."""
    return sum(parameter.shard(shards) for parameter in parameters)
