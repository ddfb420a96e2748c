"""The largest model that fits, by layout: the most layers of a preset's width, on a cluster or on this machine."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache

from gptlite.config import Config
from gptlite.errors import ConfigError
from gptlite.models.spec import spec_of
from gptlite.parallelism.layout import num_stages, resolve
from gptlite.plan.capacity import rank_memory, too_large
from gptlite.plan.config import ClusterConfig
from gptlite.plan.local import this_machine
from gptlite.plan.memory import most
from gptlite.plan.parameters import num_blocks, with_blocks
from gptlite.plan.planning import Log, cluster_worlds, given_keys, limited, thrifty_space, with_planned_vocabulary
from gptlite.plan.search import layouts
from gptlite.plan.workload import RankBytes, Workload

MOST_LAYERS = 1 << 16


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

    @property
    def override(self) -> str:
        """What makes a model of a preset as deep."""
        return f"model.{spec_of(self.work.model).blocks_key}={self.layers}"


def largest_models(config: Config, log: Log = print) -> tuple[ClusterConfig, list[Largest]]:
    """The deepest model of each combination of degrees and ZeRO stage, the largest first.

    What `config.run.overrides` gives of `parallelism` and data.micro_batch_size stays; the rest is what takes least:
    full recomputation, micro-batches of one sequence. Raises ConfigError where no layout fits one layer.
    """
    config = with_planned_vocabulary(config, log)[0]
    # As many layers as any pipeline has stages: how many there are is what is asked for.
    config = replace(config, model=with_blocks(config.model, MOST_LAYERS))
    cluster = this_machine(config.cluster, log, given=given_keys(config, "cluster"))
    found: dict[tuple[str, ...], Largest] = {}
    for world in cluster_worlds(cluster, config):
        here = limited(cluster, config, world)
        space = thrifty_space(config, here)
        for parallelism in layouts(space, here, world):
            try:
                layout = resolve(parallelism, world)
            except ConfigError:
                continue
            work = replace(space.work, parallelism=parallelism, layout=layout)
            best = None if space.refuses(parallelism, work.micro_batch_size) else deepest(work, here)
            key = (str(world), layout.describe(replace(parallelism, sequence=False)))
            if best and (key not in found or best.layers > found[key].layers):
                found[key] = best
    if not found:
        raise ConfigError(
            f"no layout of cluster={cluster.name} fits one layer of {spec_of(config.model).label(config.model)}; "
            "try a smaller data.sequence_length, or more memory"
        )
    return cluster, sorted(found.values(), key=lambda each: (-each.layers, each.memory.total))


def deepest(work: Workload, cluster: ClusterConfig) -> Largest | None:
    """The most layers of a layout that fit; memory grows with each layer."""
    world = work.layout.world_size
    depths = range(num_stages(work.parallelism), MOST_LAYERS)

    @cache
    def at(layers: int) -> Largest | None:
        its = replace(work, model=with_blocks(work.model, layers))
        memory = most(its)[1]
        return None if too_large(its, memory, cluster, world) else Largest(its, memory, rank_memory(cluster, world))

    too_many = bisect_left(depths, True, key=lambda layers: at(layers) is None)
    return at(depths[too_many - 1]) if too_many else None
