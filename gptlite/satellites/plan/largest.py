"""Search for the largest model that fits a cluster: for each layout, the most layers at the width of a preset."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache

from gptlite.config.cluster import ClusterConfig
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.models.registry import spec_of
from gptlite.parallelism.layout import num_stages
from gptlite.progress import Log
from gptlite.satellites.plan.capacity import rank_memory, too_large
from gptlite.satellites.plan.local import this_machine
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.parameters import num_blocks, repeats, with_blocks
from gptlite.satellites.plan.planning import cluster_worlds, given_keys, limited, thrifty_space, with_planned_vocabulary
from gptlite.satellites.plan.search import workloads
from gptlite.satellites.plan.workload import RankBytes, Workload

MOST_LAYERS = 1 << 16


@dataclass(frozen=True)
class Largest:
    """The deepest model that fits a layout. `memory`: of the fullest rank. `room`: limit of a rank in bytes."""

    work: Workload
    memory: RankBytes
    room: float

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return num_blocks(self.work.model)

    @property
    def override(self) -> str:
        """Override that sets the number of layers of the preset."""
        return f"model.{spec_of(self.work.model).blocks_key}={self.layers}"


def largest_models(config: Config, log: Log = print) -> tuple[ClusterConfig, list[Largest]]:
    """Return the cluster, and the deepest model of each combination of degrees and ZeRO stage, the largest first.

    Keys of `parallelism` and data.micro_batch_size that `config.run.overrides` sets are kept. The other keys take the
    values that need the least memory: full recomputation and micro-batches of one sequence. Raises ConfigError if no
    layout fits one layer, or if the model's blocks differ from each other.
    """
    config = with_planned_vocabulary(config, log)[0]
    if not repeats(config.model):
        raise ConfigError(
            f"largest=true needs equal blocks, and those of {spec_of(config.model).label(config.model)} differ; "
            "give another model, such as model=gpt2, or leave out largest=true"
        )
    # Start with enough layers for a pipeline of any length; `deepest` then finds the depth of each layout.
    config = replace(config, model=with_blocks(config.model, MOST_LAYERS))
    cluster = this_machine(config.cluster, log, explicit=given_keys(config, "cluster"))
    models: dict[tuple[str, ...], Largest] = {}
    for world in cluster_worlds(cluster, config):
        here = limited(cluster, config, world)
        space = thrifty_space(config, here)
        for work, reason in workloads(space, here, world):
            best = None if reason else deepest(work, here)
            # Layouts that differ only in sequence parallelism share a row; the deeper model is kept.
            key = (str(world), work.layout.describe(replace(work.parallelism, sequence=False)))
            if best and (key not in models or best.layers > models[key].layers):
                models[key] = best
    if not models:
        raise ConfigError(
            f"no layout of cluster={cluster.name} fits one layer of {spec_of(config.model).label(config.model)}; "
            "try a smaller data.sequence_length, or a cluster with more memory"
        )
    return cluster, sorted(models.values(), key=lambda each: (-each.layers, each.memory.total))


def deepest(work: Workload, cluster: ClusterConfig) -> Largest | None:
    """Return the model with the most layers that fits a layout, None if no model fits.

    The depth is found by bisection, as memory grows with each layer.
    """
    world = work.layout.world_size
    depths = range(num_stages(work.parallelism), MOST_LAYERS)

    @cache
    def at(layers: int) -> Largest | None:
        deeper = replace(work, model=with_blocks(work.model, layers))
        memory = most(deeper)[1]
        fits = not too_large(deeper, memory, cluster, world)
        return Largest(deeper, memory, rank_memory(cluster, world)) if fits else None

    too_many = bisect_left(depths, True, key=lambda layers: at(layers) is None)
    return at(depths[too_many - 1]) if too_many else None
