"""Number of ranks with which an elastic run goes on: the largest legal layout whose other degrees stay."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace

from gptlite.config.batch import check_world
from gptlite.config.overrides import hydra_value
from gptlite.config.plugins import as_override
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.invocation import launched_command
from gptlite.parallelism.axes import every_axis
from gptlite.progress import counted
from gptlite.satellites.noise.checks import check_groups
from gptlite.satellites.zeropp.check import check_ranks, wanted


def largest(config: Config, world: int) -> int:
    """Return the number of ranks of the largest legal layout on at most `world` ranks; 0 if there is none.

    The global batch and all degrees but `data` stay. A layout is legal if train.py would accept it on so many ranks:
    the expert degree and dp_replicate divide the data degree, each data rank has a sample, and the pipeline's schedule
    can run the micro-batches.
    """
    step = ranks_per_copy(config)
    most = step * min(world // step, config.data.global_batch_size)  # each data rank has a sample
    return next((ranks for ranks in range(most, 0, -step) if not refusal(config, ranks)), 0)


def smallest(config: Config) -> int | None:
    """Return the smallest number of ranks that `largest` can give; None if there is none."""
    step = ranks_per_copy(config)
    most = step * config.data.global_batch_size
    return next((ranks for ranks in range(step, most + 1, step) if not refusal(config, ranks)), None)


def refusal(config: Config, ranks: int) -> str:
    """Return the reason why the run has no legal layout on `ranks` ranks; empty if it has one."""
    if config.parallelism.deterministic:  # samples run one by one
        config = replace(config, data=replace(config.data, micro_batch_size=1))
    try:
        layout = check_world(config, ranks)
        check_groups(config, layout.data_size)
        if wanted(config):
            check_ranks(config.parallelism.zeropp, layout.size("dp_shard"))
    except ConfigError as error:
        return str(error)
    return ""


def too_few(config: Config, world: int) -> str:
    """Return a line for a run that cannot go on with `world` ranks: what it needs, and the command to go on."""
    kept = ("tensor", "pipeline", "context", "expert", "dp_replicate")
    degrees = {f"parallelism.{key}": getattr(config.parallelism, key) for key in kept}
    key = " ".join(f"{key}={degree}" for key, degree in degrees.items() if degree > 1) or "the run"
    least = smallest(config)
    needs = f"needs {counted(least, 'rank')}" if least else f"has no legal layout: {refusal(config, world)}"
    more = [as_override(config.plugins)] if config.plugins else []
    resume = shlex.join([f"run.dir={hydra_value(config.run.dir)}", *more])
    return f"{key} {needs}, but only {world} are left; go on, with more, by: {launched_command()} {resume}"


def ranks_per_copy(config: Config) -> int:
    """Return the number of ranks that share the samples of one data rank: tensor x pipeline x context."""
    layout = config.parallelism
    return math.prod(getattr(layout, axis.key) for axis in every_axis() if axis.factor and axis.key != "data")
