"""Every legal layout of a model on some devices, those that fit by predicted speed, the others with the reason."""

from __future__ import annotations

import gc
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from gptlite.errors import ConfigError
from gptlite.models.spec import spec_of
from gptlite.parallelism.config import ActivationCheckpointing, Offload, ParallelismConfig
from gptlite.parallelism.layout import SCHEDULES, ScheduleRule, divisors, resolve
from gptlite.plan.capacity import least_bytes, least_too_large, too_large
from gptlite.plan.config import ClusterConfig
from gptlite.plan.cost import Costs
from gptlite.plan.memory import most
from gptlite.plan.parameters import num_blocks
from gptlite.plan.workload import Prediction, RankBytes, Workload

MICRO_BATCHES = (1, 2, 4, 8, 16)
WANTED = 30  # kinds of layouts that fit, where nobody says how many are shown
ASKED = 300  # layouts that are counted exactly where nothing fits, to say how little would do
SHORTEST_CHUNK = 1024  # positions: with shorter ones another axis divides the same work for less traffic
UNKNOWN = (0, RankBytes(0, 0, 0, 0))  # the memory of a layout that has only been timed
UNEVEN_STAGES = (2, 3, 4)  # a rank, looked at where they do not divide its layers as well: the head weighs some layers
# Of a predicted step, with constants from data sheets, against runs of other code bases: llm.c, FlashAttention and
# Megatron-LM on H100s are within 6% (docs/planner_published.md, "Unseen"; tests/plan/test_published.py, which names an
# exception). One constant was chosen with these runs in view, hence the margin.
ERROR = 0.08
Refuses = Callable[[ParallelismConfig, int], str]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Space:
    """What is searched: `work` has the model, the batch and the dtype, and the values of the keys in `fixed`, fields of
    ParallelismConfig and `micro_batch_size`, which stay as they are.

    `refuses` gives the reason why a run with a layout and a micro-batch could not be configured, or nothing. `wanted`:
    kinds of layouts that fit, of those with other degrees or another ZeRO stage, after which slower ones are left out.
    """

    work: Workload
    fixed: frozenset[str]
    refuses: Refuses
    wanted: int = WANTED

    def values(self, key: str, others: list[Any]) -> list[Any]:
        """What a field of ParallelismConfig may be: `others` where it is not fixed."""
        return [getattr(self.work.parallelism, key)] if key in self.fixed else others


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, and what it is predicted to take."""

    work: Workload
    prediction: Prediction

    @property
    def words(self) -> str:
        """The layout and its micro-batch."""
        words = self.work.layout.describe(self.work.parallelism)
        return f"{words}, micro-batch {self.work.micro_batch_size}"


@dataclass
class Found:
    """What a search has found. `ranked`: fastest first, of those that fit as many as were wanted. `pruned`: how many
    layouts for a kind of reason.

    `tried`: all that there are. `slower`: those that were not asked whether they fit, since enough faster ones do.
    `examples`: what one of each kind is told. `smallest`: where nothing fits, the least memory that a layout takes on
    its fullest rank, and that layout.
    """

    ranked: list[Candidate] = field(default_factory=list)
    pruned: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    smallest: tuple[RankBytes, Workload] | None = None
    tried: int = 0
    slower: int = 0

    def prune(self, kind: str, example: str) -> None:
        """One layout less."""
        self.pruned[kind] += 1
        self.examples.setdefault(kind, example)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection is off while entered: it would go through all layouts kept, again and again, and find none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def search(space: Space, cluster: ClusterConfig, world: int, progress: Progress = lambda done, total: None) -> Found:
    """All layouts on `world` ranks by predicted speed, those that do not fit left out until `space.wanted` kinds do.

    Where none fits in the devices' memory alone, and nothing is said of offload, the same with offload to their hosts',
    if it is known how much memory these have, and then with the optimizer's state on disks, if it is known where they
    are: it costs time, so it is no rival of a layout that fits without.

    `progress` is called now and then with how much of it is done, and how much there is. Raises ConfigError where no
    layout is legal, whatever the memory.
    """
    found = _searched(space, cluster, world, progress)
    base = space.work.parallelism
    if "offload" in space.fixed or base.offload is not Offload.none:
        return found
    disk = {"offload": Offload.nvme, "offload_path": cluster.disk_path}
    for there, keys in ((cluster.host_memory_gib, {"offload": Offload.cpu}), (cluster.disk_path, disk)):
        if there is None or found.ranked:
            continue
        offloading = replace(space, work=replace(space.work, parallelism=replace(base, **keys)))
        try:
            offloaded = _searched(offloading, cluster, world, progress)
        except ConfigError:  # this optimizer cannot
            continue
        tried, pruned = found.tried + offloaded.tried, found.pruned + offloaded.pruned
        examples = found.examples | offloaded.examples
        found = replace(offloaded if offloaded.ranked else found, tried=tried, pruned=pruned, examples=examples)
    return found


def _searched(space: Space, cluster: ClusterConfig, world: int, progress: Progress) -> Found:
    found, timed, costs = Found(), list[Candidate](), Costs(cluster)
    least, thriftiest = math.inf, list[Workload]()
    for work, reason in workloads(space, cluster, world, progress):
        found.tried += 1
        if reason:
            found.prune("illegal", reason)
            continue
        bound = least_bytes(work)
        if bound < least:
            least, thriftiest = bound, []
        if bound == least:  # of the state's mean over the ranks: what a rank takes differs by ten times
            thriftiest.append(work)
        if too_much := least_too_large(work, bound, cluster, world):
            found.prune("does not fit", too_much)
            continue
        timed.append(Candidate(work, costs.predict(work, UNKNOWN)))
    if not thriftiest:
        reason = found.examples.get("illegal", "no layout has that many ranks")
        raise ConfigError(f"no layout of {world} ranks is legal: {reason}")
    timed.sort(key=lambda each: each.prediction.step_seconds)
    _keep_fitting(found, timed, cluster, world, space.wanted)
    if not found.ranked and found.smallest is None:
        asked = [(most(work)[1], work) for work in sorted(thriftiest, key=_thrift)[:ASKED]]
        found.smallest = min(asked, key=lambda each: each[0].total)
    found.ranked.sort(key=lambda each: (each.prediction.step_seconds, each.prediction.memory.total))
    return found


def _keep_fitting(found: Found, timed: list[Candidate], cluster: ClusterConfig, world: int, wanted: int) -> None:
    """Moves the fastest that fit into `found`: all that are equal to the fastest, then until there are enough kinds."""
    kinds, equal = set[tuple[int, ...]](), math.inf
    thriftiest: dict[object, Workload] = {}
    for work in (each.work for each in timed):
        thriftiest[_family(work)] = min(thriftiest.get(_family(work), work), work, key=_thrift)
    refused: dict[object, list[tuple[tuple[int, ...], str]]] = {}

    def asked(work: Workload) -> tuple[int, RankBytes, str]:
        """The fullest rank, what it takes, and why that does not fit; of a thriftier layout of the family, if one did
        not fit."""
        family, mine = _family(work), _thrift(work)
        if family not in refused:  # if the least does not fit, none does
            refused[family] = []
            asked(thriftiest[family])
        for its, why in refused[family]:
            if all(map(operator.le, its, mine)):
                return *UNKNOWN, why
        rank, memory = most(work)
        if found.smallest is None or memory.total < found.smallest[0].total:
            found.smallest = memory, work
        if too_much := too_large(work, memory, cluster, world):
            refused[family].append((mine, too_much))
        return rank, memory, too_much

    for each in timed:
        seconds = each.prediction.step_seconds
        # Of a kind that is there only those that are as good as the fastest are of interest.
        if seconds > equal and (len(kinds) >= wanted or _kind(each) in kinds):
            found.slower += 1
            continue
        rank, memory, too_much = asked(each.work)
        if too_much:
            found.prune("does not fit", too_much)
            continue
        kinds.add(_kind(each))
        equal = min(equal, seconds * (1 + ERROR))
        found.ranked.append(replace(each, prediction=replace(each.prediction, memory=memory, memory_rank=rank)))


def _family(work: Workload) -> tuple[object, ...]:
    """A layout without what always takes more memory, or always less: its micro-batch and its recomputation."""
    config = work.parallelism
    how = config.schedule, config.virtual_stages, config.zero, config.sequence, config.offload
    return work.layout, *how


def _thrift(work: Workload) -> tuple[int, ...]:
    """Orders layouts by the memory they look like taking, the least first."""
    modes = (ActivationCheckpointing.full, ActivationCheckpointing.selective)
    mode = work.parallelism.activation_checkpointing
    return work.micro_batch_size, modes.index(mode) if mode in modes else len(modes), -work.parallelism.zero


def equal_seconds(found: Found) -> float:
    """The longest step that the error of a prediction cannot tell from the fastest."""
    return found.ranked[0].prediction.step_seconds * (1 + ERROR)


def equals(found: Found) -> list[Candidate]:
    """The candidates with no longer a step than that."""
    return [each for each in found.ranked if each.prediction.step_seconds <= equal_seconds(found)]


def distinct(found: Found, count: int) -> list[Candidate]:
    """The fastest candidates, each with other degrees or another ZeRO stage: not ten versions of the best."""
    seen: dict[tuple[int, ...], Candidate] = {}
    for each in found.ranked:
        seen.setdefault(_kind(each), each)
    return list(seen.values())[:count]


def _kind(each: Candidate) -> tuple[int, ...]:
    its = each.work.parallelism
    return its.tensor, its.pipeline, its.context, each.work.layout.data_size, its.zero


def workloads(
    space: Space, cluster: ClusterConfig, world: int, progress: Progress = lambda done, total: None
) -> Iterator[tuple[Workload, str]]:
    """Every layout to look at, and the reason why it could not run; empty where it could."""
    every = list(layouts(space, cluster, world))
    for number, parallelism in enumerate(every):
        progress(number, len(every))
        try:
            layout = resolve(parallelism, world)
        except ConfigError as error:
            yield space.work, str(error)
            continue
        each = space.work.global_batch_size // layout.data_size
        sizes = [size for size in MICRO_BATCHES if each and each % size == 0]
        if "micro_batch_size" in space.fixed:
            sizes = [space.work.micro_batch_size]
        for micro in sizes or [1]:  # which the configuration's own check then refuses in words
            reason = space.refuses(parallelism, micro)
            work = replace(space.work, parallelism=parallelism, layout=layout, micro_batch_size=micro)
            yield work, reason


def layouts(space: Space, cluster: ClusterConfig, world: int) -> Iterator[ParallelismConfig]:
    """Every combination of degrees with that product, and of how each axis is run."""
    base, model = space.work.parallelism, space.work.model
    node = cluster.devices_per_node or world
    sizes, spec = list((spec_of(model).tensor_sizes(model) or {"": 1}).values()), spec_of(model)
    heads = [d for d in divisors(min(sizes)) if not any(size % d for size in sizes) and d <= max(node, 1)]
    depths = [d for d in divisors(world) if d <= (spec.num_blocks(model) or 1)]
    axes = space.values("tensor", heads), space.values("pipeline", depths), _contexts(space, world)
    for tensor, pipeline, context in product(*axes):
        inner = tensor * pipeline * context
        if world % inner == 0 and base.data in (None, world // inner):
            degrees = replace(base, tensor=tensor, pipeline=pipeline, context=context, data=world // inner)
            yield from _ways(degrees, space, node)


def _contexts(space: Space, world: int) -> list[int]:
    """Over how many ranks sequences may be cut."""
    length, model = space.work.sequence_length, space.work.model
    chunked = (d for d in divisors(world) if length % (2 * d) == 0 and length // (2 * d) >= SHORTEST_CHUNK)
    takes = spec_of(model).takes_context(model)
    return space.values("context", [1, *(degree for degree in chunked if degree > 1 and takes)])


def _ways(degrees: ParallelismConfig, space: Space, node: int) -> Iterator[ParallelismConfig]:
    """How layouts of these degrees can be run."""
    sequences = space.values("sequence", [False, True] if degrees.tensor > 1 else [False])
    modes = [mode for mode in ActivationCheckpointing if mode is not ActivationCheckpointing.offload]  # asked for only
    recomputing = space.values("activation_checkpointing", modes)
    schedules, zeros = _schedules(degrees, space), _zeros(degrees, space, node)
    for (schedule, virtual), (zero, copies), sequence, mode in product(schedules, zeros, sequences, recomputing):
        yield replace(
            degrees,
            schedule=schedule,
            virtual_stages=virtual,
            zero=zero,
            dp_replicate=copies,
            sequence=sequence,
            activation_checkpointing=mode,
        )


def _schedules(degrees: ParallelismConfig, space: Space) -> list[tuple[str, int | None]]:
    """Schedules, each with its stages a rank."""
    if degrees.pipeline == 1:
        return [("1f1b", None)]  # nothing to schedule
    found: list[tuple[str, int | None]] = []
    for name in space.values("schedule", list(SCHEDULES)):
        counts: list[int | None] = [None]
        if not SCHEDULES[name].fixed:
            counts = [*_virtual_stages(SCHEDULES[name], num_blocks(space.work.model), degrees.pipeline)]
        found += [(name, count) for count in space.values("virtual_stages", counts)]
    return found


def _virtual_stages(its: ScheduleRule, layers: int, ranks: int) -> list[int]:
    """How many stages a rank may hold: all numbers that divide its layers, and the small ones that leave stages uneven.

    A single one is 1F1B again, but for a schedule that splits backward passes.
    """
    most = layers // ranks
    even = divisors(most) if layers % ranks == 0 else []
    counts = {*even, *(count for count in UNEVEN_STAGES if count <= most), *([1] if its.splits_backward else [])}
    # Where there are no layers for two, the check's own words say so.
    return sorted(count for count in counts if count > 1 or its.splits_backward) or [its.virtual]


def _zeros(degrees: ParallelismConfig, space: Space, node: int) -> list[tuple[int, int]]:
    """ZeRO stages with their number of copies: shards over all data ranks, or over those of one node alone (HSDP)."""
    data = degrees.data or 1
    if data * degrees.context == 1:
        return [(zero, 1) for zero in space.values("zero", [0])]
    inside = max(1, node // (degrees.tensor * degrees.context))
    hybrid = [data // inside] if data % inside == 0 and 1 < inside < data else []
    copies = space.values("dp_replicate", [1, *hybrid])
    return [(zero, each) for zero in space.values("zero", [0, 1, 2, 3]) for each in (copies if zero else [1])]
