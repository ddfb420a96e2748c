"""Exhaustive search over the layouts of a model on a number of devices. Legal layouts that fit are ranked by predicted
speed; the reasons against the others are counted."""

from __future__ import annotations

import gc
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from gptlite.config.cluster import ClusterConfig
from gptlite.errors import ConfigError
from gptlite.models.registry import spec_of
from gptlite.parallelism.config import ActivationCheckpointing, Offload, ParallelismConfig
from gptlite.parallelism.layout import SCHEDULES, ScheduleRule, divisors, resolve
from gptlite.progress import Log, Progress
from gptlite.satellites.plan.capacity import least_bytes, least_too_large, too_large
from gptlite.satellites.plan.cost import Costs
from gptlite.satellites.plan.hardware import ranks_on_node
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.parameters import num_blocks
from gptlite.satellites.plan.workload import Prediction, RankBytes, Workload

REPORT_SECONDS = 5.0  # if predicting all layouts takes longer, a line reports that the next phase begins
MICRO_BATCHES = tuple(2**power for power in range(5))  # micro-batch sizes to try, in sequences
MICRO_SAMPLES = tuple(2**power for power in range(11))  # in samples, which may be far smaller than a sequence
WANTED = 30  # default of Space.wanted
ASKED = 300  # if no layout fits: number of layouts whose memory is computed exactly to report the smallest
SHORTEST_CHUNK = 1024  # positions of a context chunk: with shorter chunks, other axes need less traffic
UNKNOWN = (0, RankBytes(0, 0, 0, 0))  # placeholder for the memory of a layout that has only been timed
# Stages per rank that are tried even if they do not divide its layers: the head costs as much as several layers.
UNEVEN_STAGES = (2, 3, 4)
# Relative error of a predicted step between layouts of one cluster and code. With constants from data sheets,
# predictions are within 6.1% of published runs of llm.c, FlashAttention and Megatron-LM on H100s
# (docs/planner_published.md, "Unseen"; tests/plan/test_published.py names an exception). One constant was chosen with
# knowledge of these runs, hence the margin. Code with other kernels is further off, as the report says.
ERROR = 0.08
Refuses = Callable[[ParallelismConfig, int], str]


@dataclass(frozen=True)
class Space:
    """Search space of layouts. A layout is a ParallelismConfig with a micro-batch size.

    `work` has the model, the batch, the dtype, and the values of the keys in `fixed`. These are fields of
    ParallelismConfig, or `micro_batch_size`, that the search does not change. `refuses` returns the reason why a layout
    cannot be configured, or an empty string. `wanted`: once layouts of this many kinds fit, slower layouts are left
    out; a kind is a combination of degrees and ZeRO stage.
    """

    work: Workload
    fixed: frozenset[str]
    refuses: Refuses
    wanted: int = WANTED

    def values(self, key: str, others: list[Any]) -> list[Any]:
        """Return the values to try for a field of ParallelismConfig: `others` unless it is fixed."""
        return [getattr(self.work.parallelism, key)] if key in self.fixed else others


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, and its prediction."""

    work: Workload
    prediction: Prediction

    @property
    def words(self) -> str:
        """Description of the layout and its micro-batch."""
        words = self.work.layout.describe(self.work.parallelism)
        return f"{words}, micro-batch {self.work.micro_batch_size}"


@dataclass
class SearchResult:
    """Result of a search. `ranked`: the layouts that fit, fastest first (see `Space.wanted`). `pruned`: number of
    layouts left out, by kind of reason. `examples`: one message per kind of reason.

    `tried`: number of all layouts. `slower`: number of layouts whose memory was not computed, since enough faster ones
    fit. `smallest`: the layout with the smallest memory on its fullest rank, and that memory, for the case that no
    layout fits.
    """

    ranked: list[Candidate] = field(default_factory=list)
    pruned: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    smallest: tuple[RankBytes, Workload] | None = None
    tried: int = 0
    slower: int = 0

    def prune(self, kind: str, example: str) -> None:
        """Count one more layout that is left out."""
        self.pruned[kind] += 1
        self.examples.setdefault(kind, example)

    def merged(self, other: SearchResult) -> SearchResult:
        """Return the combined results of two searches."""
        smallest = [found for found in (self.smallest, other.smallest) if found]
        return SearchResult(
            ranked=sorted(self.ranked + other.ranked, key=_speed),
            pruned=self.pruned + other.pruned,
            examples=other.examples | self.examples,
            smallest=min(smallest, key=lambda each: each[0].total, default=None),
            tried=self.tried + other.tried,
            slower=self.slower + other.slower,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection in the block, because it would repeatedly traverse all kept layouts and find no
    garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def search(space: Space, cluster: ClusterConfig, world: int, log: Log = lambda line: None) -> SearchResult:
    """Return the fastest layouts on `world` ranks that fit, ordered by predicted speed (`Space.wanted` limits their
    number).

    If none fits in device memory and offload is not fixed, the search is repeated with offload to the hosts' memory, if
    its size is known, and then with the optimizer state on disk, if a path is known. Offload costs time, so it is not
    tried if a layout fits without it.

    `log` receives progress lines. Raises ConfigError if no layout is legal, regardless of memory.
    """
    result = _searched(space, cluster, world, log)
    base = space.work.parallelism
    if "offload" in space.fixed or base.offload is not Offload.none:
        return result
    disk = {"offload": Offload.nvme, "offload_path": cluster.disk_path}
    for available, keys in ((cluster.host_memory_gib, {"offload": Offload.cpu}), (cluster.disk_path, disk)):
        if available is None or result.ranked:
            continue
        offloading = replace(space, work=replace(space.work, parallelism=replace(base, **keys)))
        try:
            result = replace(result.merged(_searched(offloading, cluster, world, log)), smallest=result.smallest)
        except ConfigError:  # this optimizer does not support offload
            continue
    return result


def _searched(space: Space, cluster: ClusterConfig, world: int, log: Log) -> SearchResult:
    """Search once, with the offload of `space`. Layouts are timed first, as their exact memory takes longer."""
    result, timed, costs = SearchResult(), list[Candidate](), Costs(cluster)
    least, thriftiest = math.inf, list[Workload]()
    for work, reason in workloads(space, cluster, world, log):
        result.tried += 1
        if reason:
            result.prune("illegal", reason)
            continue
        bound = least_bytes(work)
        if bound < least:
            least, thriftiest = bound, []
        # The bound is a mean over ranks; the exact peaks of layouts with equal bounds differ by up to ten times.
        if bound == least:
            thriftiest.append(work)
        if too_much := least_too_large(work, bound, cluster, world):
            result.prune("does not fit", too_much)
            continue
        timed.append(Candidate(work, costs.predict(work, UNKNOWN)))
    if not thriftiest:
        reason = result.examples.get("illegal", "no layout has that many ranks")
        raise ConfigError(f"no layout of {world} ranks is legal: {reason}")
    timed.sort(key=lambda each: each.prediction.step_seconds)
    _keep_fitting(result, timed, cluster, world, space.wanted)
    if not result.ranked and result.smallest is None:
        counted = [(most(work)[1], work) for work in sorted(thriftiest, key=_thrift)[:ASKED]]
        result.smallest = min(counted, key=lambda each: each[0].total)
    result.ranked.sort(key=_speed)
    return result


def _keep_fitting(
    result: SearchResult, timed: list[Candidate], cluster: ClusterConfig, world: int, wanted: int
) -> None:
    """Add the fastest layouts that fit to `result`: all that are equal to the fastest within ERROR, then the fastest of
    each further kind until there are `wanted` kinds. `timed` is sorted by speed."""
    kinds, equal = set[tuple[int, ...]](), math.inf
    thriftiest: dict[object, Workload] = {}
    for work in (candidate.work for candidate in timed):
        thriftiest[_family(work)] = min(thriftiest.get(_family(work), work), work, key=_thrift)
    refused: dict[object, list[tuple[tuple[int, ...], str]]] = {}

    def check_memory(work: Workload) -> tuple[int, RankBytes, str]:
        """Return the fullest rank, its bytes, and the reason why they do not fit, or an empty string.

        If a thriftier layout of the same family does not fit, return that layout's reason without computing the memory.
        """
        family, mine = _family(work), _thrift(work)
        if family not in refused:  # if the thriftiest layout does not fit, no layout of the family does
            refused[family] = []
            check_memory(thriftiest[family])
        for least, reason in refused[family]:
            if all(map(operator.le, least, mine)):
                return *UNKNOWN, reason
        rank, memory = most(work)
        if result.smallest is None or memory.total < result.smallest[0].total:
            result.smallest = memory, work
        if too_much := too_large(work, memory, cluster, world):
            refused[family].append((mine, too_much))
        return rank, memory, too_much

    for candidate in timed:
        seconds = candidate.prediction.step_seconds
        # A second layout of a kind is kept only if it is equal to the fastest.
        if seconds > equal and (len(kinds) >= wanted or _kind(candidate) in kinds):
            result.slower += 1
            continue
        rank, memory, too_much = check_memory(candidate.work)
        if too_much:
            result.prune("does not fit", too_much)
            continue
        kinds.add(_kind(candidate))
        equal = min(equal, seconds * (1 + ERROR))  # set by the first layout that fits, as `timed` is sorted
        result.ranked.append(
            replace(candidate, prediction=replace(candidate.prediction, memory=memory, memory_rank=rank))
        )


def _family(work: Workload) -> tuple[object, ...]:
    """Return a layout's fields without those that change memory monotonically: micro-batch size and recomputation."""
    config = work.parallelism
    how = config.schedule, config.virtual_stages, config.zero, config.sequence, config.offload
    return work.layout, *how


def _thrift(work: Workload) -> tuple[int, ...]:
    """Return a sort key of layouts, from least to most memory within a family."""
    modes = (ActivationCheckpointing.full, ActivationCheckpointing.selective)
    mode = work.parallelism.activation_checkpointing
    return work.micro_batch_size, modes.index(mode) if mode in modes else len(modes), -work.parallelism.zero


def equal_seconds(found: SearchResult) -> float:
    """Return the longest step time that counts as equal to the fastest, within the prediction's error."""
    return found.ranked[0].prediction.step_seconds * (1 + ERROR)


def equals(found: SearchResult) -> list[Candidate]:
    """Return the candidates whose steps are no longer than `equal_seconds`."""
    return [each for each in found.ranked if each.prediction.step_seconds <= equal_seconds(found)]


def distinct(found: SearchResult, count: int) -> list[Candidate]:
    """Return the fastest candidate of each kind (combination of degrees and ZeRO stage), at most `count`."""
    seen: dict[tuple[int, ...], Candidate] = {}
    for each in found.ranked:
        seen.setdefault(_kind(each), each)
    return list(seen.values())[:count]


def _kind(each: Candidate) -> tuple[int, ...]:
    config = each.work.parallelism
    return config.tensor, config.pipeline, config.context, config.expert, each.work.layout.data_size, config.zero


def _speed(each: Candidate) -> tuple[float, int]:
    return each.prediction.step_seconds, each.prediction.memory.total


def workloads(
    space: Space, cluster: ClusterConfig, world: int, log: Log = lambda line: None
) -> Iterator[tuple[Workload, str]]:
    """Yield every layout, with the reason why it cannot run, or an empty string if it can."""
    every = list(layouts(space, cluster, world))
    label, started = f"plan for {world} ranks", time.monotonic()
    # Progress counts combinations. Each has one layout per micro-batch size, so there are more layouts.
    unit = "combinations of degrees and options"
    progress = Progress(label, len(every), log, unit=unit)
    local = ranks_on_node(cluster, world)
    for number, parallelism in enumerate(every):
        if number == 1:  # restart the clock for the ETA: the first combination included the profile of the model
            progress = Progress(label, len(every), log, done=1, unit=unit)
        progress.add(number > 0)
        try:
            layout = resolve(parallelism, world)
        except ConfigError as error:
            yield space.work, str(error)
            continue
        each = space.work.global_batch_size // layout.data_size
        tried = MICRO_SAMPLES if space.work.sample else MICRO_BATCHES
        sizes = [size for size in tried if each and each % size == 0]
        if "micro_batch_size" in space.fixed:
            sizes = [space.work.micro_batch_size]
        for micro in sizes or [1]:  # if no size is valid, `refuses` returns the reason for size 1
            reason = space.refuses(parallelism, micro)
            work = replace(space.work, parallelism=parallelism, layout=layout, micro_batch_size=micro, node_ranks=local)
            yield work, reason
    if time.monotonic() - started > REPORT_SECONDS:
        log(f"{label}: checking the memory of the fastest layouts")


def layouts(space: Space, cluster: ClusterConfig, world: int) -> Iterator[ParallelismConfig]:
    """Yield every combination of degrees whose product is `world`, and of the options of each axis."""
    base, model = space.work.parallelism, space.work.model
    node = cluster.devices_per_node or world
    sizes, spec = list((spec_of(model).tensor_sizes(model) or {"": 1}).values()), spec_of(model)
    # The tensor axis stays within a node, because it communicates in every layer.
    heads = [d for d in divisors(min(sizes)) if not any(size % d for size in sizes) and d <= max(node, 1)]
    depths = [d for d in divisors(world) if d <= (spec.num_blocks(model) or 1)]
    axes = space.values("tensor", heads), space.values("pipeline", depths), _contexts(space, world)
    for tensor, pipeline, context in product(*axes):
        inner = tensor * pipeline * context
        if world % inner or base.data not in (None, world // inner):
            continue
        sharing = [d for d in divisors(spec.experts(model) or 1) if world // (tensor * pipeline) % d == 0]
        for expert in space.values("expert", sharing):
            degrees = replace(base, tensor=tensor, pipeline=pipeline, context=context, expert=expert)
            yield from _ways(replace(degrees, data=world // inner), space, node)


def _contexts(space: Space, world: int) -> list[int]:
    """Return the degrees of context parallelism to try."""
    length, model = space.work.sequence_length, space.work.model
    chunked = (d for d in divisors(world) if length % (2 * d) == 0 and length // (2 * d) >= SHORTEST_CHUNK)
    takes = spec_of(model).takes_context(model)
    return space.values("context", [1, *(degree for degree in chunked if degree > 1 and takes)])


def _ways(degrees: ParallelismConfig, space: Space, node: int) -> Iterator[ParallelismConfig]:
    """Yield the options of layouts with these degrees: schedule, ZeRO stage, sequence parallelism and recomputation."""
    sequences = space.values("sequence", [False, True] if degrees.tensor > 1 else [False])
    # Activation offload is used only if it is requested.
    modes = [mode for mode in ActivationCheckpointing if mode is not ActivationCheckpointing.offload]
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
    """Return the schedules to try, each with a number of stages per rank; None is the schedule's default."""
    if degrees.pipeline == 1:
        return [("1f1b", None)]  # without a pipeline there is nothing to schedule
    schedules: list[tuple[str, int | None]] = []
    for name in space.values("schedule", list(SCHEDULES)):
        counts: list[int | None] = [None]
        if not SCHEDULES[name].fixed:
            counts = [*_virtual_stages(SCHEDULES[name], num_blocks(space.work.model), degrees.pipeline)]
        schedules += [(name, count) for count in space.values("virtual_stages", counts)]
    return schedules


def _virtual_stages(schedule: ScheduleRule, layers: int, ranks: int) -> list[int]:
    """Return the numbers of stages per rank to try: those that divide a rank's layers, and small ones that may not.

    One stage per rank is included only if the schedule splits backward passes; otherwise it would be the same as 1F1B.
    """
    most = layers // ranks
    even = divisors(most) if layers % ranks == 0 else []
    counts = {*even, *(count for count in UNEVEN_STAGES if count <= most), *([1] if schedule.splits_backward else [])}
    # If there are too few layers for two stages, return the default, for which `Space.refuses` returns the reason.
    return sorted(count for count in counts if count > 1 or schedule.splits_backward) or [schedule.virtual]


def _zeros(degrees: ParallelismConfig, space: Space, node: int) -> list[tuple[int, int]]:
    """Return the ZeRO stages to try, each with a number of copies: 1 if all data ranks shard one copy of the model,
    more if the data ranks of each node do (HSDP)."""
    data = degrees.data or 1
    if data * degrees.context == 1:
        return [(zero, 1) for zero in space.values("zero", [0])]
    inside = max(1, node // (degrees.tensor * degrees.context))
    hybrid = [data // inside] if data % inside == 0 and 1 < inside < data else []
    copies = space.values("dp_replicate", [1, *hybrid])
    return [(zero, each) for zero in space.values("zero", [0, 1, 2, 3]) for each in (copies if zero else [1])]
