"""Parameters that a pipeline rank holds, grouped as FSDP2 gathers and reduces them.

Shapes come from the model itself, built on the meta device; its sharding plan determines which parameters are cut
over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gptlite.models.base import Matrices, is_built
from gptlite.models.capabilities import capability
from gptlite.models.config import ModelConfig
from gptlite.models.registry import spec_of
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.layout import num_stages, split_layers, stages_of_rank
from gptlite.satellites.plan.cache import cached, same_model
from gptlite.satellites.plan.walk import pipeline_key
from gptlite.satellites.plan.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCKS = 2  # number of blocks of a model that is built for shapes, if its blocks are equal; the last represents all
Runs = tuple[tuple[int, int], ...]  # blocks of a stage in order: kind and number of each run of equal blocks
Alike = tuple[tuple[Runs, ...], bool, bool]  # runs of the stages; has the model's beginning; has the model's end


class PlannerFacts(Protocol):
    """Capability of a spec: facts that only the planner needs. Without it, the blocks count as equal."""

    def equal_blocks(self, config: Any) -> bool:
        """Return True if all blocks have the same layers and shapes, so that the planner profiles only one of them."""
        ...


class Parameter(NamedTuple):
    """One parameter on a tensor rank, of this `shape`. FSDP2 cuts its first dim.

    `cut`: sharded over the tensor axis, else replicated. `tied`: shared with another parameter of the whole model.
    `among`: the expert degree for parameters of experts, else 1. FSDP2 shards them over that many times fewer ranks.
    `embedding`: of an embedding module.
    """

    shape: tuple[int, ...]
    cut: bool
    tied: bool = False
    among: int = 1
    embedding: bool = False

    @property
    def elements(self) -> int:
        """Number of elements before FSDP2 shards the parameter."""
        return prod(self.shape)

    def shard_shape(self, shards: int) -> tuple[int, ...]:
        """Return the shape of the longest shard if `shards` ranks shard the model; FSDP2 pads all shards to it."""
        if not self.shape:  # a scalar, which is not sharded
            return ()
        rows, *width = self.shape
        return -(-rows // expert_shards(shards, self.among)), *width

    def shard(self, shards: int) -> int:
        """Return the elements of the longest shard."""
        return prod(self.shard_shape(shards))

    def gathered(self, shards: int) -> int:
        """Return the elements of all shards, padding included; 0 for a scalar, which is not gathered."""
        return expert_shards(shards, self.among) * self.shard(shards) if self.shape else 0


class GatherGroup(NamedTuple):
    """Equal groups of parameters, each of which FSDP2 gathers and reduces together. Fields: elements of each
    parameter's shard, and of its rows, number of equal groups, True if they are in blocks, and the `among` of the
    parameters."""

    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    number: int
    block: bool
    among: int = 1

    @property
    def elements(self) -> int:
        """Elements of a group's shard."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Inventory:
    """Parameters of a model on one tensor-parallel rank.

    `kinds` has the parameters of one block of each kind. There is one kind if all blocks are equal (see `repeats`),
    else one per block. `others` has the parameters outside the blocks, keyed by (first, last): whether the pipeline
    stage is the first, and whether it is the last. `matrices` has the unsharded matrices of one block of each kind, as
    (rows, columns, number of equal matrices), with fused matrices separated. `loads` has the number of values that the
    ranks sum in a step to balance the experts, for one block of each kind.
    """

    kinds: tuple[tuple[Parameter, ...], ...]
    others: dict[tuple[bool, bool], tuple[Parameter, ...]]
    matrices: tuple[tuple[tuple[int, int, int], ...], ...]
    loads: tuple[int, ...]


@dataclass(frozen=True)
class StageParameters:
    """One part of the model: its blocks, and its parameters outside them.

    `kinds` has the parameters of each kind of block of the model. FSDP2 gathers and reduces `others` together, and
    blocks in buckets. A part that is both first and last holds a tied parameter once. `loads`: see Inventory, summed
    over the stage's blocks.
    """

    number: int
    runs: Runs
    kinds: tuple[tuple[Parameter, ...], ...]
    others: tuple[Parameter, ...]
    first: bool
    last: bool
    loads: int = 0

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return sum(count for _, count in self.runs)

    @property
    def blocks(self) -> range | None:
        """Numbers of the blocks if they differ; None if all blocks of the model are equal."""
        return range(self.runs[0][0], self.runs[-1][0] + 1) if len(self.kinds) > 1 else None

    @property
    def units(self) -> int:
        """Number of units whose split backward passes are profiled: blocks, or the whole stage if blocks differ."""
        return self.layers if self.blocks is None else 1

    def buckets(self, size: int) -> list[tuple[tuple[int, ...], int]]:
        """Return FSDP2's buckets of `size` blocks in forward order: the kinds of the blocks in a bucket, and the number
        of equal buckets in a row. The last bucket may be smaller."""
        if len(self.runs) == 1:  # avoid lists as long as the run
            ((kind, count),) = self.runs
            found = [((kind,) * size, count // size), ((kind,) * (count % size), int(count % size > 0))]
            return [each for each in found if each[1]]
        kinds = [kind for kind, count in self.runs for _ in range(count)]
        chunks = [tuple(kinds[start : start + size]) for start in range(0, len(kinds), size)]
        return [(chunk, len(list(equal))) for chunk, equal in groupby(chunks)]

    def bucket(self, kinds: Iterable[int], shards: int, *, experts: bool = True) -> int:
        """Return the elements of a gathered bucket, with or without experts that are distributed over ranks."""
        held = (self.kinds[kind] if experts else shared(self.kinds[kind], False) for kind in kinds)
        return sum(gathered_elements(each, shards) for each in held)

    def groups(self, bucket_layers: int, shards: int) -> list[GatherGroup]:
        """Return FSDP2's groups: distributed experts of each block, parameters outside blocks, buckets of blocks."""

        def group(held: Sequence[tuple[Parameter, ...]], number: int, block: bool, among: int = 1) -> GatherGroup:
            sizes, rows = (
                chain.from_iterable(map(of, held)) for of in (lambda each: shard_sizes(each, shards), row_sizes)
            )
            return GatherGroup(tuple(sizes), tuple(rows), number, block, among)

        among = max((each.among for kind in self.kinds for each in kind), default=1)
        experts = (
            [group([shared(self.kinds[kind], True)], count, True, among) for kind, count in self.runs]
            if among > 1
            else []
        )
        buckets = [
            group([shared(self.kinds[kind], False) for kind in kinds], number, True)
            for kinds, number in self.buckets(bucket_layers)
        ]
        return [each for each in [*experts, group([self.others], 1, False), *buckets] if each.sizes]

    @property
    def scalars(self) -> int:
        """Number of parameters without dims, which FSDP2 neither shards nor reduces."""
        inside = (count * sum(not each.shape for each in self.kinds[kind]) for kind, count in self.runs)
        return sum(not each.shape for each in self.others) + sum(inside)

    def parameters(self) -> list[Parameter]:
        """Return all parameters of the stage."""
        return [*self.others, *(each for kind, count in self.runs for each in self.kinds[kind] * count)]

    def sharded(self, shards: int) -> int:
        """Return the elements of the longest shard of each parameter, summed over all parameters."""
        blocks = sum(count * shard_elements(self.kinds[kind], shards) for kind, count in self.runs)
        return shard_elements(self.others, shards) + blocks


def stages(work: Workload, pp_rank: int, tp_rank: int = 0) -> list[StageParameters]:
    """Return the stages of a pipeline rank, first to last."""
    config, total = work.parallelism, num_stages(work.parallelism)
    layers = cut(work).layers
    held = inventory(work.model, work.layout.size("tp"), tp_rank, work.layout.size(EXPERT))
    rank_stages = []
    for number in stages_of_rank(config, pp_rank):
        first, last = number == 0, number == total - 1
        others = held.others.get((first, last), ())
        mine = runs(work.model, layers[number])
        rank_stages.append(StageParameters(number, mine, held.kinds, others, first, last, _loads(mine, held)))
    return rank_stages


def all_loads(work: Workload) -> int:
    """Return the number of values that ranks sum in a step to balance all experts of a model."""
    return _loads(runs(work.model, range(num_blocks(work.model))), inventory(work.model, 1))


def _loads(blocks: Runs, held: Inventory) -> int:
    return sum(count * held.loads[kind] for kind, count in blocks)


def copies(held: list[StageParameters]) -> list[Parameter]:
    """Return the tied parameters of a rank's stages of which another rank has a copy."""
    ends = [stage for stage in held if stage.first or stage.last]
    # A rank with both ends of the model, or with neither, shares no tied parameter with another.
    whole = len(ends) != 1 or ends[0].first == ends[0].last
    return [] if whole else [each for each in ends[0].others if each.tied]


@cached(lambda model, tensor, tp_rank=0, expert=1: (*same_model(model), tensor, tp_rank, expert))
def inventory(model: ModelConfig, tensor: int, tp_rank: int = 0, expert: int = 1) -> Inventory:
    """Return the parameters of a model on a rank of the tensor axis. `tensor` and `expert`: degrees of the two axes."""
    from gptlite.models.experts import routers
    from gptlite.models.model import Model
    from gptlite.models.parallelize import layers_to_cut
    from gptlite.ops.select import Ops
    from gptlite.parallelism.expert import ExpertWeights

    if (fewer := with_blocks(model, BLOCKS)) != model:
        return inventory(fewer, tensor, tp_rank, expert)
    few = Model.of(model)
    whole, spec, config = few.build(Ops(), 0), few.spec, few.config
    layers = layers_to_cut(few, whole) if tensor > 1 else ()
    dims = {f"{name}.{each}": dim for name, cut in layers for each, dim in cut.dims.items()}
    stacked = (module for module in whole.modules() if isinstance(module, ExpertWeights))
    experts = {id(each) for module in stacked for each in module.parameters()}
    tied = {*spec.tied(config), *spec.tied(config).values()}
    structure = few.matrices()

    def local(name: str, parameter: Tensor) -> Parameter:
        shape, dim = list(parameter.shape), dims.get(name)
        if dim is not None:  # cut as by torch.chunk: the last ranks may get a smaller part
            longest = -(-shape[dim] // tensor)
            shape[dim] = max(0, min(longest, shape[dim] - tp_rank * longest))
        among = 1
        if id(parameter) in experts:
            among, shape[0] = expert, shape[0] // expert
        return Parameter(tuple(shape), dim is not None, name in tied, among, name in structure.embeddings)

    def listed(part: nn.Module, blocks: Iterable[nn.Module], inside: bool = True) -> tuple[Parameter, ...]:
        """Return the parameters of a part that are `inside` the given blocks, or those outside them."""
        held = {id(each) for block in blocks for each in block.parameters()}
        return tuple(local(name, each) for name, each in part.named_parameters() if (id(each) in held) == inside)

    blocks = list(few.blocks(whole).values())
    others = {(True, True): listed(whole, blocks, inside=False)}
    for place, ends in ((0, (True, False)), (len(blocks) - 1, (False, True))):
        if spec.num_blocks(config) is not None:
            part = deepcopy(whole)  # `keep` removes modules in place
            spec.keep(part, config, range(place, place + 1))
            others[ends] = listed(part, few.blocks(part).values(), inside=False)
    of_kinds = blocks[-1:] if repeats(model) else blocks
    kinds = [listed(whole, [block]) for block in of_kinds]
    names = {id(each): name for name, each in whole.named_parameters()}
    matrices = [_matrices(structure, {names[id(p)]: p for p in block.parameters()}) for block in of_kinds]
    loads = [sum(len(each.load) + 1 for each in routers(block)) for block in of_kinds]
    return Inventory(tuple(kinds), others, tuple(matrices), tuple(loads))


def _matrices(structure: Matrices, block: Mapping[str, Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Return (rows, columns, number) of a block's matrices that map hidden activations to hidden activations."""
    shapes: list[tuple[int, int, int]] = []
    for name, tensor in block.items():
        if name in structure.embeddings:
            continue
        if (tensor.ndim == 2 and not name.endswith(structure.edges)) or (
            tensor.ndim == 3 and name.endswith(structure.batched)
        ):
            fused, (*experts, rows, columns) = structure.fused or {}, tensor.shape
            sizes = next((sizes for end, (_, sizes) in fused.items() if name.endswith(end)), (1,))
            shapes += [(rows * size // sum(sizes), columns, prod(experts)) for size in sizes]
    return tuple(shapes)


def repeats(model: Any) -> bool:
    """Return True if a model's blocks are equal and a key of its configuration sets their number."""
    spec = spec_of(model)
    if is_built(spec.num_blocks) or (number := spec.num_blocks(model)) is None:
        return False
    facts = capability(spec, PlannerFacts)
    return getattr(model, spec.blocks_key, None) == number and (facts is None or facts.equal_blocks(model))


def runs(model: Any, blocks: range) -> Runs:
    """Return runs of consecutive blocks: one run of kind 0 if a model's blocks are equal, else one per block, whose
    kind is the block's number."""
    return ((0, len(blocks)),) if repeats(model) else tuple((number, 1) for number in blocks)


def with_blocks(model: Any, blocks: int) -> Any:
    """Return a model's configuration with that many blocks; unchanged if the model's blocks differ from each other."""
    return replace(model, **{spec_of(model).blocks_key: blocks}) if repeats(model) else model


@cached(lambda model, expert=1: (*same_model(model), expert))
def num_parameters(model: ModelConfig, expert: int = 1) -> int:
    """Return the number of parameters of a model. If `expert` is above 1, 1 / `expert` of its experts are counted."""
    held = inventory(model, 1, 0, expert)
    return StageParameters(
        0, runs(model, range(num_blocks(model))), held.kinds, held.others[True, True], True, True
    ).sharded(1)


def num_blocks(model: ModelConfig) -> int:
    """Return the number of blocks of a model."""
    return spec_of(model).num_blocks(model) or len(inventory(model, 1).kinds)


@dataclass(frozen=True)
class PipelinePartition:
    """Partition of a model over a pipeline: the layers of each stage, the stages of each rank, the kind of each rank,
    and the first rank of each kind. Ranks of a kind have equal blocks and the same ends, so they do the same work."""

    layers: tuple[range, ...]
    stages: tuple[tuple[int, ...], ...]
    kinds: tuple[Alike, ...]
    first: dict[Alike, int]


@cached(lambda work: (*same_model(work.model), *pipeline_key(work.parallelism)))
def cut(work: Workload) -> PipelinePartition:
    """Return the partition of a workload's model over its pipeline."""
    config, spec = work.parallelism, spec_of(work.model)
    costs = spec.flops(work.model, spec.max_length(work.model) or 1) or (1, 0)  # as in Model.stage_blocks
    layers = tuple(split_layers(num_blocks(work.model), num_stages(config), *costs))
    held = tuple(tuple(stages_of_rank(config, rank)) for rank in range(config.pipeline))
    blocks = [runs(work.model, each) for each in layers]
    kinds = tuple((tuple(blocks[stage] for stage in mine), 0 in mine, len(layers) - 1 in mine) for mine in held)
    return PipelinePartition(layers, held, kinds, {kind: kinds.index(kind) for kind in kinds})


def expert_shards(shards: int, among: int) -> int:
    """Return the number of data ranks that shard a parameter with this `among`, if `shards` ranks shard parameters that
    are not of experts."""
    return max(1, shards // among)


@lru_cache
def shard_elements(parameters: tuple[Parameter, ...], shards: int) -> int:
    """Return the elements of the longest shard of each parameter, summed."""
    return sum(parameter.shard(shards) for parameter in parameters)


@lru_cache
def shard_sizes(parameters: tuple[Parameter, ...], shards: int) -> tuple[int, ...]:
    """Return the elements of the longest shard of each parameter that has dims."""
    return tuple(parameter.shard(shards) for parameter in parameters if parameter.shape)


@lru_cache
def row_sizes(parameters: tuple[Parameter, ...]) -> tuple[int, ...]:
    """Return the elements of a row of each parameter that has dims."""
    return tuple(prod(parameter.shape[1:]) for parameter in parameters if parameter.shape)


@lru_cache
def gathered_elements(parameters: tuple[Parameter, ...], shards: int) -> int:
    """Return the elements of all shards of each parameter, summed."""
    return sum(parameter.gathered(shards) for parameter in parameters)


@lru_cache
def shared(parameters: tuple[Parameter, ...], experts: bool) -> tuple[Parameter, ...]:
    """Return the parameters of experts that are distributed over ranks, or all others."""
    return tuple(each for each in parameters if (each.among > 1) == experts)
