"""The largest model that fits, by layout: the most layers of a preset's width, on a cluster or on this machine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from gptlite.config import Config
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.metrics.console import banner, format_bytes, format_count, table
from gptlite.models.spec import spec_of
from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.parallelism.layout import Layout, resolve
from gptlite.parallelism.words import layout_words
from gptlite.plan.config import ClusterConfig
from gptlite.plan.local import this_machine
from gptlite.plan.memory import most
from gptlite.plan.parameters import num_blocks, num_parameters, with_blocks
from gptlite.plan.pictures import draw_largest, make_folder
from gptlite.plan.room import rank_memory, too_large
from gptlite.plan.search import Space, layouts
from gptlite.plan.workload import RankBytes, Workload
from gptlite.planning import (
    Log,
    cluster_worlds,
    fixed_keys,
    given_keys,
    limited,
    space_of,
    train_overrides,
    with_planned_vocabulary,
)

MOST_LAYERS = 1 << 16
HEADINGS = ("#", "layout", "layers", "parameters", "memory/rank", "of")


@dataclass(frozen=True)
class Largest:
    """A layout's deepest model that fits: what its fullest rank takes, and what it may."""

    work: Workload
    memory: RankBytes
    room: float

    @property
    def layers(self) -> int:
        """Of the model."""
        return num_blocks(self.work.model)


def largest_models(config: Config, log: Log = print) -> tuple[ClusterConfig, list[Largest]]:
    """The deepest model of each combination of degrees and ZeRO stage, the largest first.

    What `config.run.overrides` gives of `parallelism` and data.micro_batch_size stays; the rest is what takes least:
    full recomputation, micro-batches of one sequence. Raises ConfigError where no layout fits one layer.
    """
    config = with_planned_vocabulary(config, log)[0]
    cluster = this_machine(config.cluster, log, given=given_keys(config, "cluster"))
    found: dict[tuple[str, ...], Largest] = {}
    for world in cluster_worlds(cluster, config):
        here = limited(cluster, config, world)
        space = _thrifty(config, here)
        for parallelism in layouts(space, here, world):
            try:
                layout = resolve(parallelism, world)
            except ConfigError:
                continue
            work = replace(space.work, parallelism=parallelism, layout=layout)
            best = deepest(space, work, here)
            key = (str(world), layout_words(replace(parallelism, sequence=False), layout))
            if best and (key not in found or best.layers > found[key].layers):
                found[key] = best
    if not found:
        raise ConfigError(
            f"no layout of cluster={cluster.name} fits one layer of {_label(config)}; try a smaller "
            "data.sequence_length, or more memory"
        )
    return cluster, sorted(found.values(), key=lambda each: (-each.layers, each.memory.total))


def deepest(space: Space, work: Workload, cluster: ClusterConfig) -> Largest | None:
    """The most layers of a layout that are legal and fit, by halving; memory grows with each layer."""
    fits: dict[int, Largest | None] = {}

    def at(layers: int) -> Largest | None:
        if layers not in fits:
            its = replace(work, model=with_blocks(work.model, layers))
            memory = most(its)[1]
            world = its.layout.world_size
            small = not too_large(its, memory, cluster, world)
            fits[layers] = Largest(its, memory, rank_memory(cluster, world)) if small else None
        return fits[layers]

    low = work.parallelism.pipeline * (work.parallelism.virtual_stages or 1)
    if space.refuses(work.parallelism, work.micro_batch_size) or not at(low):
        return None
    high = 2 * low
    while at(high) and high < MOST_LAYERS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) else (low, middle)
    return at(low)


def _thrifty(config: Config, cluster: ClusterConfig) -> Space:
    """The layouts that take least memory, of those that the command line leaves open."""
    fixed, parallelism, data = fixed_keys(config), replace(config.parallelism, auto=False), config.data
    if "activation_checkpointing" not in fixed:
        parallelism = replace(parallelism, activation_checkpointing=ActivationCheckpointing.full)
    if "micro_batch_size" not in fixed:
        data = replace(data, micro_batch_size=1)
    if "schedule" not in fixed:
        parallelism = replace(parallelism, schedule="1f1b", virtual_stages=None)
    keys = fixed | {"activation_checkpointing", "micro_batch_size", "schedule", "virtual_stages", "dp_replicate"}
    # As many layers as any pipeline has stages: how many there are is what is asked for.
    model = with_blocks(config.model, MOST_LAYERS)
    space = space_of(replace(config, parallelism=parallelism, data=data, model=model), cluster, frozenset(keys))
    return replace(space, work=replace(space.work, layout=Layout()))


def report(config: Config, cluster: ClusterConfig, found: list[Largest], top: int) -> str:
    """The banner, the table and the command that trains the largest."""
    model = found[0].work.model
    spec = spec_of(model)
    each, nodes = cluster.devices_per_node or 1, cluster.nodes or 1
    limit = config.trainer.host_memory_limit
    held = f"{limit:g} GiB a rank (trainer.host_memory_limit)" if limit else f"{cluster.memory_gib:.3g} GiB"
    lines = [
        ("model", f"{spec.label(model)}: {spec.words(model)}"),
        ("cluster", f"{cluster.name}: {nodes} x {each} {'cores' if cluster.device == 'cpu' else 'GPUs'} of {held}, "
                    f"{cluster.reserved_gib:g} GiB of it for libraries"),
        ("batch", f"{found[0].work.global_batch_size} sequences of {found[0].work.sequence_length}, "
                  f"{found[0].work.dtype}; recomputation {found[0].work.parallelism.activation_checkpointing.value}"),
    ]  # fmt: skip
    rows = [
        (str(number), layout_words(its.work.parallelism, its.work.layout), str(its.layers),
         format_count(num_parameters(its.work.model)), format_bytes(its.memory.total), format_bytes(its.room))
        for number, its in enumerate(found[:top], 1)
    ]  # fmt: skip
    text = table(HEADINGS, rows, right="# layers parameters memory/rank of", indent="")
    return "\n".join(
        [banner(lines, title="largest model"), *text, "", "train the largest with", train_command(config, found[0])]
    )


def train_command(config: Config, its: Largest) -> str:
    """The command line that trains a model in its layout."""
    words = train_overrides(config.run.overrides, its.work)
    key = f"model.{spec_of(config.model).blocks_key}"
    kept = [each for each in words if not each.startswith(f"{key}=")]
    return f"{command('train')} {shlex.join([*kept, f'{key}={its.layers}'])}"


def draw(config: Config, cluster: ClusterConfig, found: list[Largest], top: int, folder: Path) -> Path:
    """The table's rows as a picture, largest.png in `folder`."""
    shown, nodes = found[:top], cluster.nodes or 1
    make_folder(folder)
    return draw_largest(
        [layout_words(each.work.parallelism, each.work.layout) for each in shown],
        [each.layers for each in shown],
        [f"{each.layers}: {format_count(num_parameters(each.work.model))} parameters" for each in shown],
        [each.memory for each in shown],
        [each.room for each in shown],
        f"The most layers of {_label(config)}'s width that fit {cluster.name}, {nodes} node{'s' * (nodes > 1)}",
        folder / "largest.png",
    )


def _label(config: Config) -> str:
    return spec_of(config.model).label(config.model)
