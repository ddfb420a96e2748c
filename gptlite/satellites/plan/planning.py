"""Layout search for a configuration, used by `parallelism=auto` and `gptlite plan`, and its result as overrides."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from gptlite.config.checks import check_layout
from gptlite.config.cluster import ClusterConfig
from gptlite.config.completed import with_vocabulary
from gptlite.config.overrides import key_of
from gptlite.config.plugins import CHECKS
from gptlite.config.saved import override_value
from gptlite.config.schema import Config
from gptlite.data.batches import batch_schedule
from gptlite.data.vocabulary import find_vocabulary
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.models.config import ModelConfig
from gptlite.models.registry import spec_of
from gptlite.ops.config import Attention, Implementation, OpsConfig
from gptlite.optimizer.schedule import resolve_warmup_steps
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.layout import Layout, divisors, largest_micro_batch
from gptlite.precision import SCALED, Policy, Precision, Reduce
from gptlite.progress import Log
from gptlite.satellites.plan.cache import Same, cached
from gptlite.satellites.plan.capacity import GIB, rank_memory
from gptlite.satellites.plan.hardware import ranks_on_node
from gptlite.satellites.plan.local import this_machine
from gptlite.satellites.plan.search import WANTED, Candidate, SearchResult, Space, search
from gptlite.satellites.plan.workload import Sample, Workload

MOST_NODES = 4096  # largest number of nodes that is tried if a model does not fit
# Fields of ParallelismConfig that the search chooses, in the order of a candidate's overrides.
CHOSEN = (
    *("tensor", "sequence", "context", "expert", "pipeline", "schedule", "virtual_stages", "data", "dp_replicate"),
    *("zero", "activation_checkpointing", "offload", "offload_path"),
)


@dataclass(frozen=True)
class Plan:
    """Result of a search for layouts of a configuration on a cluster.

    `assumed`: the reason why the vocabulary size is a guess, empty if it is known.
    """

    config: Config
    cluster: ClusterConfig
    found: SearchResult
    assumed: str = ""

    @property
    def best(self) -> Candidate:
        """The fastest layout that fits."""
        return self.found.ranked[0]


def make_plan(config: Config, world: int | None = None, log: Log = print, wanted: int = WANTED) -> Plan:
    """Return the plan of a configuration on its `cluster`, or on `world` ranks of it.

    The search ends after `wanted` combinations of degrees and ZeRO stage that fit. Keys of `parallelism` and
    `data.micro_batch_size` that `config.run.overrides` sets are kept. Raises ConfigError if no layout is legal, or if
    no layout fits; the message then has the missing memory and a fix.
    """
    sized, assumed = with_planned_vocabulary(config, log)
    cluster = this_machine(config.cluster, log, explicit=given_keys(config, "cluster"))
    result, refusal = SearchResult(), None
    for world_size in [world] if world is not None else cluster_worlds(cluster, config):
        here = limited(cluster, config, world_size)
        space = replace(space_of(sized, here, fixed_keys(config)), wanted=wanted)
        try:
            result = result.merged(search(space, here, world_size, log))
        except ConfigError as error:
            refusal = error  # raised only if no world size has a legal layout
    if refusal and not result.tried:
        raise refusal
    if not result.ranked:
        raise ConfigError(too_small(sized, cluster, result) + assumed_words(sized.model, assumed))
    return Plan(config, cluster, result, assumed)


def chosen(config: Config, world: int | None = None, log: Log = print) -> Config:
    """Return the configuration with its plan's best layout, and log the layout. Raises ConfigError like `make_plan`."""
    plan = make_plan(config, world, log, wanted=1)
    best = plan.best
    log(
        f"parallelism=auto: {best.words}; predicted {best.prediction.step_seconds:.3g} s per step, the fastest of "
        f"{plan.found.tried} layouts ({command('plan')} shows them)"
        f"{assumed_words(best.work.model, plan.assumed)}"
    )
    return apply(config, best)


def apply(config: Config, candidate: Candidate) -> Config:
    """Return the configuration with a candidate's layout and micro-batch size."""
    work = candidate.work
    layout = replace(work.parallelism, auto=False)
    return replace(config, parallelism=layout, data=replace(config.data, micro_batch_size=work.micro_batch_size))


def overrides(work: Workload) -> list[str]:
    """Return the overrides that select a layout: its differences from ParallelismConfig's defaults, and the micro-batch
    size."""
    values = {key: getattr(work.parallelism, key) for key in CHOSEN}
    differences = [
        f"parallelism.{key}={override_value(value)}"
        for key, value in values.items()
        if value != getattr(ParallelismConfig(), key)
    ]
    return [*differences, f"data.micro_batch_size={work.micro_batch_size}"]


def train_overrides(original: Iterable[str], work: Workload, *more: str) -> list[str]:
    """Return the overrides of a training command: `original`, then those of the layout and `more`.

    Overrides in `original` of the same keys are dropped, as are the preset of `parallelism` and the keys of `cluster`.
    """
    decided = [*overrides(work), *more]
    keys = set(map(key_of, decided))
    kept = [each for each in original if key_of(each) not in keys]
    return [*(each for each in kept if not each.startswith(("parallelism=", "cluster"))), *decided]


def limited(cluster: ClusterConfig, config: Config, world: int) -> ClusterConfig:
    """Return the cluster with its memory limited to `trainer.host_memory_limit` per rank, if its devices are CPUs."""
    limit = config.trainer.host_memory_limit
    if limit is None or cluster.device != "cpu":
        return cluster
    return replace(cluster, memory_gib=min(cluster.memory_gib, limit * ranks_on_node(cluster, world)))


def rank_limit(config: Config, cluster: ClusterConfig, work: Workload) -> float:
    """Return the bytes that each rank of a layout may use."""
    world = work.layout.world_size
    return rank_memory(limited(cluster, config, world), world)


def thrifty_space(config: Config, cluster: ClusterConfig, **least: object) -> Space:
    """Return the search space of layouts with the least memory: full recomputation, 1F1B, micro-batches of one
    sequence, one replica of the model, and the values of `parallelism` in `least`. Command-line values are kept."""
    fixed = fixed_keys(config)
    least = {"activation_checkpointing": ActivationCheckpointing.full, "schedule": "1f1b", **least}
    values = {key: value for key, value in least.items() if key not in fixed}
    if "schedule" in values:
        values["virtual_stages"] = None
    config = replace(config, parallelism=replace(config.parallelism, **values))
    return space_of(config, cluster, fixed | least.keys() | {"micro_batch_size", "virtual_stages", "dp_replicate"})


def space_of(config: Config, cluster: ClusterConfig, fixed: frozenset[str]) -> Space:
    """Return the search space of a configuration, in which every key except the `fixed` ones varies."""
    config, steps = with_planned_vocabulary(config)[0], config.trainer.max_steps
    work = Workload(
        model=config.model,
        parallelism=replace(config.parallelism, auto=False),
        layout=Layout(),
        optimizer=config.optimizer.completed(steps, resolve_warmup_steps(config.schedule, steps)),
        global_batch_size=config.data.global_batch_size,
        micro_batch_size=config.data.micro_batch_size or 1,
        sequence_length=config.data.sequence_length,
        dtype=planned_dtype(config, cluster),
        attention=planned_attention(config.ops, config.model, cluster.device),
        device=cluster.device,
        master_weights=config.precision.master_weights,
        amp=config.precision.dtype.value.partition("amp_")[2],
        half_sums=config.precision.reduce is Reduce.compute,
        fp8=config.precision.dtype is Precision.fp8,
        sample=None if config.data.unit == "tokens" else planned_sample(config.data),
        steps=steps,
    )

    def refuses(parallelism: ParallelismConfig, micro_batch: int) -> str:
        data = replace(config.data, micro_batch_size=micro_batch)
        if work.sample and parallelism.pipeline > 1 and not hasattr(work.sample.x, "shape"):
            return (
                f"parallelism.pipeline={parallelism.pipeline} needs samples whose input is one tensor, not "
                f"{type(work.sample.x).__name__}; use parallelism.pipeline=1"
            )
        layout = replace(config, parallelism=parallelism, data=data)
        try:
            check_layout(layout)
            for refuse in CHECKS:
                refuse(layout)
        except ConfigError as error:
            return str(error)
        return ""

    return Space(work, fixed, refuses)


def workload_of(config: Config, layout: Layout, cluster: ClusterConfig) -> Workload:
    """Return the workload of a configuration with the given layout, to predict a run without a search."""
    space = space_of(config, cluster, frozenset())
    micro = config.data.micro_batch_size
    if micro is None:
        sizes = batch_schedule(config.data.global_batch_size, config.data.batch_ramp).sizes()
        micro = largest_micro_batch(config.parallelism, sizes, layout.data_size)
    node = ranks_on_node(cluster, layout.world_size)
    return replace(space.work, layout=layout, micro_batch_size=micro or 1, node_ranks=node)


def running(work: Workload, config: Config, policy: Policy) -> Workload:
    """Return the workload with the compute dtype of a run's policy, if `precision=auto` left the choice to the run."""
    if config.precision.dtype is not Precision.auto:
        return work
    return replace(work, dtype="fp32" if policy.compute_dtype.itemsize == 4 else "bf16")


@cached(Same)
def planned_sample(data: Any) -> Sample:
    """Return the shapes of a dataset's first sample. Raises ConfigError if the dataset cannot be opened."""
    from gptlite.satellites.samples.dataset import open_samples
    from gptlite.torch_private.ops import tree_leaves, tree_map

    x, target = tree_map(lambda leaf: leaf.to("meta"), open_samples(data).example())
    sizes = (sum(leaf.nbytes for leaf in tree_leaves(each)) for each in (x, target))
    return Sample(x, target, *sizes, words=f"{x} {target}")


def fixed_keys(config: Config) -> frozenset[str]:
    """Return the fields of `parallelism`, and micro_batch_size, that the command line sets; the search keeps them."""
    own = {item.name for item in fields(ParallelismConfig)}
    keys = given_keys(config, "parallelism") & own
    if config.data.micro_batch_size is not None:
        keys.add("micro_batch_size")
    mentioned = any(each.lstrip("+").startswith("parallelism") for each in config.run.overrides)
    if mentioned and not config.parallelism.auto:  # a preset fixes all fields except `data`
        keys |= own - {"data"}
    return frozenset(keys)


def given_keys(config: Config, section: str) -> set[str]:
    """Return the keys of a section that the command line sets, without the section's name."""
    return {
        key.removeprefix(f"{section}.") for key in map(key_of, config.run.overrides) if key.startswith(f"{section}.")
    }


def planned_dtype(config: Config, cluster: ClusterConfig) -> str:
    """Return the compute dtype of a run; with `precision=auto`, bf16 if the cluster has a peak for it, else fp32."""
    if config.precision.dtype in SCALED:
        return "fp16"
    if config.precision.dtype is Precision.fp8:
        return "bf16"  # of all ops but the linear layers of blocks, see Workload.fp8
    if config.precision.dtype is not Precision.auto:
        return config.precision.dtype.value
    return "bf16" if "bf16" in cluster.peak_tflops else "fp32"


def planned_attention(ops: OpsConfig, model: ModelConfig, device: str) -> Attention:
    """Return the attention implementation that `ops` selects on the device, assuming that a C++ compiler is present."""
    if ops.attention is not Attention.auto:
        return ops.attention
    _, _, drops = spec_of(model).attention(model) or (0, 0, False)
    if device == "cuda":
        return Attention.matmul if drops else Attention.sdpa
    reference = ops.implementation is Implementation.reference
    return Attention.matmul if reference or drops else Attention.fused


def with_planned_vocabulary(config: Config, log: Log = print) -> tuple[Config, str]:
    """Return the configuration with a vocabulary size, and the reason if this size is a guess, else an empty string.

    If the model has no vocabulary size, that of the data is used.
    """
    if config.data.unit != "tokens" or vocabulary_of(config.model) is not None:
        return config, ""
    found = find_vocabulary(config.data, log)
    return with_vocabulary(config, found.size), found.assumed


def assumed_words(model: ModelConfig, assumed: str) -> str:
    """Return a message's suffix about an assumed vocabulary size, empty if `assumed` is."""
    return f"; vocabulary of {vocabulary_of(model)} assumed: {assumed}" if assumed else ""


def vocabulary_of(model: ModelConfig) -> int | None:
    """Return a model's vocabulary size, None if it is unknown."""
    return spec_of(model).vocab_size(model)


def too_small(config: Config, cluster: ClusterConfig, result: SearchResult) -> str:
    """Return the error message if no layout of a model fits, with the missing memory and a fix."""
    assert result.smallest is not None
    memory, work = result.smallest
    nodes, smaller = (
        enough_nodes(config, cluster),
        f"a smaller model{' or data.sequence_length' if not work.sample else ''}",
    )
    return (
        f"{spec_of(config.model).label(config.model)} does not fit cluster={cluster.name} "
        f"cluster.nodes={cluster.nodes or 1}: of {result.tried} layouts the smallest "
        f"({work.layout.describe(work.parallelism)}) takes {memory.total / GIB:.1f} GiB on a rank, "
        f"{(memory.total - rank_limit(config, cluster, work)) / GIB:.1f} GiB more than available; try "
        f"{f'cluster.nodes={nodes}' if nodes else smaller}"
    )


def enough_nodes(config: Config, cluster: ClusterConfig) -> int | None:
    """Return the number of nodes on which a layout fits; None on CPUs, or if it would exceed MOST_NODES.

    The cluster's number is doubled until one of the layouts with the least memory fits.
    """
    nodes = cluster.nodes or 1
    while cluster.device == "cuda" and (nodes := nodes * 2) <= MOST_NODES:
        larger = replace(cluster, nodes=nodes)
        space = replace(thrifty_space(config, larger, zero=3), wanted=1)
        with suppress(ConfigError):
            if search(space, larger, nodes * (cluster.devices_per_node or 1)).ranked:
                return nodes
    return None


def cluster_worlds(cluster: ClusterConfig, config: Config) -> list[int]:
    """Return the world sizes to plan for: the number of devices.

    On CPUs its divisors are included, since a rank can use several cores, unless cluster.devices_per_node is given.
    """
    devices = (cluster.nodes or 1) * (cluster.devices_per_node or 1)
    if cluster.device == "cpu" and config.cluster.devices_per_node is None:
        return divisors(devices)
    return [devices]
