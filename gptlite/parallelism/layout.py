"""Layout arithmetic: axis degrees, pipeline stages and schedule constraints. Does not import torch."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gptlite.errors import ConfigError, did_you_mean
from gptlite.parallelism.axes import (
    AXES,
    CONTEXT,
    DATA_AXES,
    EXPERT,
    EXPERT_AXES,
    EXPERT_DATA_AXES,
    every_axis,
    folded,
)
from gptlite.parallelism.config import ParallelismConfig

ONE_RANK = "one rank"  # description of the layout of a single rank
MAX_MICRO_BATCH = 16  # sequences; upper limit for a micro-batch size that is chosen automatically


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh dimensions, in the order of AXES (slowest first), and degrees of the folded axes.

    For parameters, context-parallel ranks act as data-parallel ranks: they hold replicas or shards, and their gradients
    are summed. They are therefore neighbours on the data axes.
    """

    sizes: tuple[int, ...] = (1,) * len(AXES)
    folded: tuple[int, ...] = field(default_factory=lambda: (1,) * len(folded()))

    def __post_init__(self) -> None:
        if len(self.sizes) != len(AXES):
            raise ValueError(f"got {len(self.sizes)} sizes for the {len(AXES)} axes {', '.join(AXES)}")
        # Degrees that are not given are 1.
        object.__setattr__(self, "folded", (*self.folded, *[1] * (len(folded()) - len(self.folded))))

    @cached_property
    def degrees(self) -> dict[str, int]:
        """Degree of each axis by name, including the data axes of the experts' mesh."""
        found = dict(zip((*AXES, *(axis.name for axis in folded())), (*self.sizes, *self.folded), strict=True))
        (copies, shards), among = (found[axis] for axis in DATA_AXES), found[EXPERT]
        data = (copies, shards // among) if shards > 1 else (copies // among, 1)
        return found | dict(zip(EXPERT_DATA_AXES, data, strict=True))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.sizes)

    @cached_property
    def fsdp_size(self) -> int:
        """Number of ranks that process different tokens, and whose gradients are summed: dp_replicate * dp_shard."""
        return self.size(*DATA_AXES)

    @cached_property
    def data_size(self) -> int:
        """Number of data-parallel parts of a global batch."""
        return self.fsdp_size // self.sharing

    @cached_property
    def sharing(self) -> int:
        """Number of data ranks that share each sample."""
        return math.prod([self.degrees[axis.name] for axis in folded() if axis.factor])

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """Sizes of the experts' mesh, in the order of EXPERT_AXES."""
        return tuple(self.degrees[axis] for axis in EXPERT_AXES)

    @property
    def context(self) -> int:
        """Number of ranks that share each sequence."""
        return self.degrees[CONTEXT]

    def size(self, *axes: str) -> int:
        """Return the degree of an axis, or the product of the degrees of several. Raises KeyError for an unknown
        axis."""
        return self.degrees[axes[0]] if len(axes) == 1 else math.prod([self.degrees[axis] for axis in axes])

    def stride(self, axis: str) -> int:
        """Return the difference between the rank numbers of neighbours along an axis."""
        if axis in EXPERT_DATA_AXES:
            return math.prod(self.expert_sizes[EXPERT_AXES.index(axis) + 1 :])
        # A group of a folded axis is consecutive along the fastest of the axes that it is folded over.
        last = next((each.over[-1] for each in folded() if each.name == axis), axis)
        return math.prod(self.sizes[AXES.index(last) + 1 :])

    def coordinate(self, rank: int, *axes: str) -> int:
        """Return a rank's index along an axis, or along several adjacent axes of the mesh, given slowest first."""
        return rank // self.stride(axes[-1]) % self.size(*axes)

    def data_rank(self, rank: int) -> int:
        """Return the index of the part of the global batch that a rank reads."""
        return self.coordinate(rank, *DATA_AXES) // self.sharing  # ranks that share samples are neighbours

    def describe(self, config: ParallelismConfig) -> str:
        """Describe the layout by all that affects rounding, e.g. `pipeline 2 x data 2 (zero 1) x tensor 2, 1f1b`."""
        if self.world_size == 1:
            return ONE_RANK
        parts, data = [], f" ({', '.join(self._data_words(config))})"
        for axis in every_axis():
            size = self.data_size if axis.key == "data" else self.size(axis.name)
            if size == 1 or not axis.label:
                continue
            text = " (sequence)" if axis.key == "tensor" and config.sequence else ""
            if axis.key == "data" or axis.over:
                text, data = data, ""  # shown only once, with the first data or folded axis
            parts.append(f"{axis.label} {size}{text}")
        text = " x ".join(parts)
        if self.size("pp") > 1:
            stages = stages_per_rank(config)
            text += f", {config.schedule}{f' with {stages} stages a rank' if stages > 1 else ''}"
        return text

    def _data_words(self, config: ParallelismConfig) -> list[str]:
        parts = [f"zero {config.zero}"]
        if config.zero and (copies := self.size("dp_replicate")) > 1:
            parts.append(f"{copies} copies of {self.size('dp_shard')} shards")
        if config.bucket_layers > 1:
            parts.append(f"buckets of {config.bucket_layers} layers")
        return parts


@dataclass(frozen=True)
class ScheduleRule:
    """Constraints of a torch.distributed.pipelining schedule."""

    # Used by config checks and the planner, as torch raises for a violation only after the ranks have started.
    torch_name: str  # as torch's get_schedule_class takes it
    virtual: int  # default number of stages per rank
    fixed: bool = False  # the number of stages cannot be changed
    fill: bool = False  # needs at least as many micro-batches as the pipeline has ranks
    even_rounds: bool = False  # runs max(1, micro-batches // ranks) rounds, which must have equally many micro-batches
    splits_backward: bool = False  # computes weight gradients separately from, and later than, input gradients
    v_shape: bool = False  # a rank's second stage mirrors its first: rank 0 holds the first and the last stage

    def runs(self, pipeline: int, micro_batches: int) -> bool:
        """Return True if a pipeline of `pipeline` ranks can run `micro_batches` micro-batches per step."""
        rounds = max(1, micro_batches // pipeline)
        return not (self.fill and micro_batches < pipeline) and not (self.even_rounds and micro_batches % rounds)


SCHEDULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule("GPipe", virtual=1, fixed=True),
    "1f1b": ScheduleRule("1F1B", virtual=1, fixed=True, fill=True),
    "interleaved_1f1b": ScheduleRule("Interleaved1F1B", virtual=2, even_rounds=True),
    "zero_bubble": ScheduleRule("InterleavedZeroBubble", virtual=2, even_rounds=True, splits_backward=True),
    "zbv": ScheduleRule("ZBVZeroBubble", virtual=2, fixed=True, splits_backward=True, v_shape=True),
}


def rule(config: ParallelismConfig) -> ScheduleRule:
    """Return the rule of the configured schedule. Raises ConfigError for an unknown schedule."""
    if config.schedule not in SCHEDULES:
        hint = did_you_mean(config.schedule, SCHEDULES)
        raise ConfigError(f"parallelism.schedule={config.schedule} is not one of {', '.join(SCHEDULES)}{hint}")
    return SCHEDULES[config.schedule]


def splits_backward(config: ParallelismConfig) -> bool:
    """Return True if a pipeline schedule splits backward passes into an input-gradient and a weight-gradient pass."""
    return config.pipeline > 1 and rule(config).splits_backward


def resolve(config: ParallelismConfig, world: int) -> Layout:
    """Return the layout on `world` ranks. `data: null` is `world` / (tensor x pipeline x context).

    Without ZeRO, data-parallel and context-parallel ranks hold replicas of the model state. With ZeRO, each of
    `dp_replicate` replicas is sharded over an equal number of these ranks. Raises ConfigError if the product of the
    degrees is not `world`, or if `dp_replicate` or the degree of a folded axis does not divide the number of ranks that
    it applies to.
    """
    inner = _inner(config)
    data = world // inner if config.data is None else config.data
    if data < 1 or inner * data != world:
        raise ConfigError(_unequal(config, world))
    replicate = config.dp_replicate
    if data % replicate:
        raise ConfigError(
            f"parallelism.dp_replicate={replicate} does not divide the {data} data-parallel ranks; "
            f"try parallelism.dp_replicate={listed(divisors(data))}"
        )
    if config.zero == 0 and replicate not in (1, data):
        raise ConfigError(
            f"parallelism.dp_replicate={replicate} has no meaning with parallelism.zero=0, which replicates the model "
            f"on all {data} data-parallel ranks; use parallelism.dp_replicate=1, or parallelism.zero=1, 2 or 3"
        )
    degrees = {axis.name: getattr(config, axis.key) for axis in every_axis()}
    ranks = data * math.prod(degrees[axis.name] for axis in folded() if axis.factor)
    degrees["dp_replicate"], degrees["dp_shard"] = (ranks, 1) if config.zero == 0 else (replicate, ranks // replicate)
    layout = Layout(tuple(degrees[name] for name in AXES), tuple(degrees[axis.name] for axis in folded()))
    for axis in folded():
        # If dp_shard > 1, experts are divided along dp_shard only, so that each replica of the model has all experts.
        shared = axis.over[-1:] if axis.name == EXPERT and layout.size("dp_shard") > 1 else axis.over
        ranks, degree = layout.size(*shared), layout.size(axis.name)
        if ranks % degree:
            raise ConfigError(
                f"parallelism.{axis.key}={degree} does not divide the {ranks} rank{'s' if ranks > 1 else ''} of "
                f"{' x '.join(shared)}; try parallelism.{axis.key}={listed(divisors(ranks))}"
            )
    return layout


def _degrees(config: ParallelismConfig) -> dict[str, int | None]:
    """Return `{key: degree}` for the axes whose degrees multiply to the world size."""
    return {axis.key: getattr(config, axis.key) for axis in every_axis() if axis.factor}


def _inner(config: ParallelismConfig) -> int:
    """Return the product of all degrees except data: the number of ranks per data-parallel part of a batch."""
    return math.prod(degree or 1 for key, degree in _degrees(config).items() if key != "data")


def _unequal(config: ParallelismConfig, world: int) -> str:
    """Return a message such as `world size 6 = parallelism.pipeline=4 x data x ... has no integer solution for data;
    try ...`."""
    degrees = _degrees(config)
    equation = " x ".join("data" if value is None else f"parallelism.{key}={value}" for key, value in degrees.items())
    product = math.prod(value or 1 for value in degrees.values())
    tries = []
    shared = [axis.key for axis in folded()]
    for key in sorted((key for key in reversed(degrees) if key not in shared), key=lambda key: key != "data"):
        others = product // (degrees[key] or 1)
        if world % others == 0 and degrees[key] is not None:
            most = world // others
            tries.append(f"parallelism.{key}={listed([most] if config.data else divisors(most))}")
    if config.data is None:
        counts = [count for count in (world // product * product, world // product * product + product) if count]
        tries.append(f"{listed(counts, 'or')} ranks")
        return f"world size {world} = {equation} has no integer solution for data; try {', or '.join(tries)}"
    tries.append(f"{product} ranks")
    return f"world size {world} is not {equation} = {product}; try {', or '.join(tries)}"


def wanted_world(config: ParallelismConfig, gpus: int) -> int:
    """Return the number of ranks that train.py starts on a machine with `gpus` GPUs; 0 means the CPU.

    If `data` is null, and the layout shards (zero > 0) or sets `spread` or `elastic`, use the largest data degree that
    fits on the GPUs, or 2 on a CPU.
    """
    inner, replicate = _inner(config), config.dp_replicate
    if config.data is not None:
        return inner * config.data
    sharing = config.expert // math.gcd(config.expert, config.context)  # the data degree must be a multiple of this
    if config.zero == 0 and (replicate > 1 or not (config.spread or config.elastic)):
        return inner * math.lcm(replicate, sharing)
    shards = gpus // (inner * replicate) if gpus else 2
    return inner * replicate * max(shards // sharing, 1) * sharing


def chunk_starts(length: int, size: int, rank: int) -> tuple[int, int]:
    """Return the starts of the two chunks that a rank holds of a sequence split over `size` ranks.

    A chunk has length / (2 size) positions. Rank r holds chunks r and 2 size - 1 - r: an early one, whose queries see
    few keys, and a late one, so that all ranks have equal work (Llama 3, arXiv:2407.21783, section 3.3.2).
    """
    chunk = length // (2 * size)
    return rank * chunk, (2 * size - 1 - rank) * chunk


def stages_per_rank(config: ParallelismConfig) -> int:
    """Return the number of stages on each pipeline rank; 1 without a pipeline."""
    return 1 if config.pipeline == 1 else config.virtual_stages or rule(config).virtual


def num_stages(config: ParallelismConfig) -> int:
    """Return the total number of pipeline stages."""
    return config.pipeline * stages_per_rank(config)


def stages_of_rank(config: ParallelismConfig, pp_rank: int) -> list[int]:
    """Return the stages of pipeline rank r, first to last: r, r + pp, ... or, in a V schedule, r and 2 * pp - 1 - r."""
    if config.pipeline > 1 and rule(config).v_shape:
        return [pp_rank, 2 * config.pipeline - 1 - pp_rank]
    return list(range(pp_rank, num_stages(config), config.pipeline))


def split_layers(num_layers: int, num_stages: int, layer_cost: float, head_cost: float) -> list[range]:
    """Split the layers into contiguous stages of at least one layer, minimising the cost of the most expensive stage.

    Costs are in any unit. The last stage also has the output head. The first stage also has the embedding, a lookup
    that is taken to cost nothing.
    """
    others = num_stages - 1
    if not others:
        return [range(num_layers)]

    def most(last: int) -> float:
        return max(-(-(num_layers - last) // others) * layer_cost, last * layer_cost + head_cost)

    # Among equal costs, take the longest last stage, which leaves the fewest layers to the others.
    last = min(range(1, num_layers - others + 1), key=lambda count: (most(count), -count))
    each, longer = divmod(num_layers - last, others)
    # The later stages get the extra layers, as earlier stages hold the activations of more micro-batches.
    sizes = [each] * (others - longer) + [each + 1] * longer + [last]
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def accumulation(global_batch: int, micro_batch: int, data_size: int) -> int:
    """Return the number of micro-batches that each data-parallel rank runs per step, including fillers."""
    return -(-global_batch // (micro_batch * data_size))


def check_micro_batches(config: ParallelismConfig, accumulation: int) -> None:
    """Raise ConfigError if the schedule cannot run `accumulation` micro-batches per step."""
    if reason := schedule_refuses(config, accumulation):
        raise ConfigError(reason)


def schedule_refuses(config: ParallelismConfig, accumulation: int) -> str:
    """Return the reason why the schedule cannot run `accumulation` micro-batches per step; empty if it can."""
    schedule, ranks = rule(config), config.pipeline
    if ranks == 1 or schedule.runs(ranks, accumulation):
        return ""
    settings = f"parallelism.schedule={config.schedule} with parallelism.pipeline={ranks}"
    if schedule.fill:
        return f"{settings} needs at least {ranks} micro-batches per step, not {accumulation}"
    below = next(count for count in range(accumulation, 0, -1) if schedule.runs(ranks, count))
    above = next(count for count in itertools.count(accumulation) if schedule.runs(ranks, count))
    return (
        f"{settings} can run {below} or {above} micro-batches per step, in equal rounds of {ranks} or more, "
        f"but not {accumulation}"
    )


def runs_batch(config: ParallelismConfig, global_batch: int, micro_batch: int, data_size: int) -> bool:
    """Return True if the layout can run a global batch in micro-batches of `micro_batch` samples. In an elastic run,
    fillers complete the last ones."""
    whole = global_batch % (micro_batch * data_size) == 0 or config.elastic
    return whole and not schedule_refuses(config, accumulation(global_batch, micro_batch, data_size))


def largest_micro_batch(config: ParallelismConfig, global_batches: Sequence[int], data_size: int) -> int | None:
    """Return the largest micro-batch size up to MAX_MICRO_BATCH with which the layout can run each of these global
    batches with the fewest fillers; None if there is none."""
    sizes = range(MAX_MICRO_BATCH, 0, -1)
    fit = [size for size in sizes if all(runs_batch(config, batch, size, data_size) for batch in global_batches)]
    return min(fit, key=lambda size: sum(-batch % (size * data_size) for batch in global_batches), default=None)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    # Divisors come in pairs around the square root, so only the smaller ones are searched.
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def listed(values: list[int], word: str = "") -> str:
    """Format numbers as `1, 2, 4` or, with the word `or`, as `1, 2 or 4`."""
    *most, last = map(str, values)
    return f"{', '.join(most)} {word} {last}" if word and most else ", ".join([*most, last])
