"""Every legal layout of a model on some devices, those that fit by predicted speed, the others with the reason."""

from __future__ import annotations

import gc
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gptlite.errors import ConfigError
from gptlite.models.spec import spec_of
from gptlite.parallelism.config import ActivationCheckpointing, Offload, ParallelismConfig
from gptlite.parallelism.layout import SCHEDULES, ScheduleRule, divisors, resolve
from gptlite.parallelism.words import layout_words
from gptlite.plan.config import ClusterConfig
from gptlite.plan.cost import Shared, predict_shared
from gptlite.plan.memory import Shared as MemoryShared
from gptlite.plan.memory import most
from gptlite.plan.parameters import num_blocks
from gptlite.plan.room import Kept, least_bytes, least_too_large, too_large
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


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, and what it is predicted to take."""

    work: Workload
    prediction: Prediction

    @property
    def words(self) -> str:
        """The layout and its micro-batch."""
        words = layout_words(self.work.parallelism, self.work.layout)
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


def search(space: Space, cluster: ClusterConfig, world: int, progress: Progress = lambda done, total: None) -> Found:
    """All layouts on `world` ranks by predicted speed, those that do not fit left out until `space.wanted` kinds do.

    Where none fits in the devices' memory alone, and nothing is said of offload, the same with offload to their hosts',
    if it is known how much memory these have, and then with the optimizer's state on disks, if it is known where they
    are: it costs time, so it is no rival of a layout that fits without.

    `progress` is called now and then with how much of it is done, and how much there is. Raises ConfigError where no
    layout is legal, whatever the memory.
    """
    with _no_collection():
        return _search(space, cluster, world, progress)


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


def _search(space: Space, cluster: ClusterConfig, world: int, progress: Progress) -> Found:
    found = _searched(space, cluster, world, progress)
    base = space.work.parallelism
    if "offload" in space.fixed or base.offload is not Offload.none:
        return found
    for config in _offloads(base, cluster):
        if found.ranked:
            break
        offloading = replace(space, work=replace(space.work, parallelism=config))
        try:
            offloaded = _searched(offloading, cluster, world, progress)
        except ConfigError:  # this optimizer cannot
            continue
        tried, pruned = found.tried + offloaded.tried, found.pruned + offloaded.pruned
        examples = found.examples | offloaded.examples
        found = replace(offloaded if offloaded.ranked else found, tried=tried, pruned=pruned, examples=examples)
    return found


def _offloads(base: ParallelismConfig, cluster: ClusterConfig) -> Iterator[ParallelismConfig]:
    """What a cluster has for offload, the fastest first."""
    if cluster.host_memory_gib is not None:
        yield replace(base, offload=Offload.cpu)
    if cluster.disk_path is not None:
        yield replace(base, offload=Offload.nvme, offload_path=cluster.disk_path)


def _searched(space: Space, cluster: ClusterConfig, world: int, progress: Progress) -> Found:
    found, timed, shared, kept = Found(), list[Candidate](), Shared(), Kept()
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
        if too_much := least_too_large(work, cluster, world, kept):
            found.prune("does not fit", too_much)
            continue
        timed.append(Candidate(work, predict_shared(work, cluster, UNKNOWN, shared)))
    if not thriftiest:
        reason = found.examples.get("illegal", "no layout has that many ranks")
        raise ConfigError(f"no layout of {world} ranks is legal: {reason}")
    timed.sort(key=lambda each: each.prediction.step_seconds)
    _keep_fitting(found, timed, cluster, world, space.wanted)
    if not found.ranked and found.smallest is None:
        found.smallest = _smallest(thriftiest)
    found.ranked.sort(key=lambda each: (each.prediction.step_seconds, each.prediction.memory.total))
    return found


def _keep_fitting(found: Found, timed: list[Candidate], cluster: ClusterConfig, world: int, wanted: int) -> None:
    """Moves the fastest that fit into `found`: all that are equal to the fastest, then until there are enough kinds."""
    kinds, shared, equal = set[tuple[int, ...]](), MemoryShared(), math.inf
    thriftiest: dict[object, Workload] = {}
    for work in (each.work for each in timed):
        least = thriftiest.setdefault(_family(work), work)
        thriftiest[_family(work)] = min(least, work, key=_thrift)
    refused: dict[object, list[tuple[tuple[int, ...], str]]] = {}

    def asked(work: Workload) -> tuple[int, RankBytes, str]:
        rank, memory = most(work, shared)
        if found.smallest is None or memory.total < found.smallest[0].total:
            found.smallest = memory, work
        too_much = too_large(work, memory, cluster, world)
        if too_much:
            refused[_family(work)].append((_thrift(work), too_much))
        return rank, memory, too_much

    def refusal(work: Workload) -> str:
        """Why a thriftier layout of the family did not fit, if one did not."""
        mine = _thrift(work)
        return next((why for its, why in refused[_family(work)] if all(map(operator.le, its, mine))), "")

    for each in timed:
        family, seconds = _family(each.work), each.prediction.step_seconds
        # Of a kind that is there only those that are as good as the fastest are of interest.
        if seconds > equal and (len(kinds) >= wanted or _kind(each) in kinds):
            found.slower += 1
            continue
        if family not in refused:  # if the least does not fit, none does
            refused[family] = []
            asked(thriftiest[family])
        why = refusal(each.work)
        rank, memory, too_much = (*UNKNOWN, why) if why else asked(each.work)
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


def _smallest(works: Sequence[Workload]) -> tuple[RankBytes, Workload]:
    """The layout whose fullest rank takes least, of some that look thrifty."""
    shared = MemoryShared()
    asked = [(most(work, shared)[1], work) for work in sorted(works, key=_thrift)[:ASKED]]
    return min(asked, key=lambda each: each[0].total)


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
        if len(seen) == count:
            break
    return list(seen.values())


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
        for micro in _micro_batches(space, layout.data_size):
            reason = space.refuses(parallelism, micro)
            work = replace(space.work, parallelism=parallelism, layout=layout, micro_batch_size=micro)
            yield work, reason


def layouts(space: Space, cluster: ClusterConfig, world: int) -> Iterator[ParallelismConfig]:
    """Every combination of degrees with that product, and of how each axis is run."""
    base, model, fixed = space.work.parallelism, space.work.model, space.fixed
    node = cluster.devices_per_node or world
    sizes, spec = list((spec_of(model).tensor_sizes(model) or {"": 1}).values()), spec_of(model)
    heads = [d for d in divisors(min(sizes)) if not any(size % d for size in sizes) and d <= max(node, 1)]
    for tensor in [base.tensor] if "tensor" in fixed else heads:
        depths = [d for d in divisors(world) if d <= (spec.num_blocks(model) or 1)]
        for pipeline in [base.pipeline] if "pipeline" in fixed else depths:
            for context in [base.context] if "context" in fixed else _contexts(space, world):
                inner = tensor * pipeline * context
                if world % inner or (base.data is not None and inner * base.data != world):
                    continue
                degrees = replace(base, tensor=tensor, pipeline=pipeline, context=context, data=world // inner)
                yield from _ways(degrees, space, node)


def _contexts(space: Space, world: int) -> list[int]:
    """Over how many ranks sequences may be cut."""
    length, model = space.work.sequence_length, space.work.model
    if not spec_of(model).takes_context(model):
        return [1]
    chunked = (d for d in divisors(world) if length % (2 * d) == 0 and length // (2 * d) >= SHORTEST_CHUNK)
    return [1, *(degree for degree in chunked if degree > 1)]


def _ways(degrees: ParallelismConfig, space: Space, node: int) -> Iterator[ParallelismConfig]:
    """How layouts of these degrees can be run."""
    fixed = space.fixed
    sequences = [False, True] if degrees.tensor > 1 else [False]
    for schedule, virtual in _schedules(degrees, fixed, num_blocks(space.work.model)):
        for zero, copies in _zeros(degrees, fixed, node):
            for sequence in [degrees.sequence] if "sequence" in fixed else sequences:
                for mode in _recomputations(degrees, fixed):
                    yield replace(
                        degrees,
                        schedule=schedule,
                        virtual_stages=virtual,
                        zero=zero,
                        dp_replicate=copies,
                        sequence=sequence,
                        activation_checkpointing=mode,
                    )


def _schedules(degrees: ParallelismConfig, fixed: frozenset[str], layers: int) -> list[tuple[str, int | None]]:
    if degrees.pipeline == 1:
        return [("1f1b", None)]  # nothing to schedule
    names = [degrees.schedule] if "schedule" in fixed else list(SCHEDULES)
    found: list[tuple[str, int | None]] = []
    for name in names:
        if "virtual_stages" in fixed:
            found.append((name, degrees.virtual_stages))
        elif SCHEDULES[name].fixed:
            found.append((name, None))
        else:
            found += [(name, count) for count in _virtual_stages(SCHEDULES[name], layers, degrees.pipeline)]
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


def _zeros(degrees: ParallelismConfig, fixed: frozenset[str], node: int) -> list[tuple[int, int]]:
    """ZeRO stages with their number of copies: shards over all data ranks, or over those of one node alone (HSDP)."""
    data = degrees.data or 1
    if data * degrees.context == 1:
        return [(degrees.zero if "zero" in fixed else 0, 1)]
    inside = max(1, node // (degrees.tensor * degrees.context))
    copies = {1} | ({data // inside} if data % inside == 0 and inside > 1 else set())
    if "dp_replicate" in fixed:
        copies = {degrees.dp_replicate}
    stages = [degrees.zero] if "zero" in fixed else [0, 1, 2, 3]
    return [(zero, each) for zero in stages for each in (sorted(copies) if zero else [1])]


def _recomputations(degrees: ParallelismConfig, fixed: frozenset[str]) -> list[ActivationCheckpointing]:
    if "activation_checkpointing" in fixed:
        return [degrees.activation_checkpointing]
    return [mode for mode in ActivationCheckpointing if mode is not ActivationCheckpointing.offload]  # asked for only


def _micro_batches(space: Space, data_size: int) -> list[int]:
    if "micro_batch_size" in space.fixed:
        return [space.work.micro_batch_size]
    each = space.work.global_batch_size // data_size
    sizes = [size for size in MICRO_BATCHES if each and each % size == 0]
    return sizes or [1]  # which the configuration's own check then refuses in words
