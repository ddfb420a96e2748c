"""Checks of elastic runs, and of the keys of checkpoints in memory and of decisions. Does not import torch."""

from __future__ import annotations

from gptlite.config.plugins import CHECKS
from gptlite.config.schema import Config
from gptlite.data.batches import batch_schedule
from gptlite.errors import ConfigError
from gptlite.optimizer.config import SGDConfig
from gptlite.satellites.elastic.decisions import check_decisions
from gptlite.satellites.elastic.kept import check_memory

KEY = "parallelism.elastic=true"


def check_elastic(config: Config) -> None:
    """Raise ConfigError if a run cannot go on with another number of data ranks, or would with another loss curve."""
    layout, data, optimizer = config.parallelism, config.data, config.optimizer
    if not layout.elastic:
        return
    if layout.data is not None:
        raise ConfigError(f"{KEY} with parallelism.data={layout.data}: an elastic run takes the data degree that its "
                          "ranks allow; leave out parallelism.data, or use parallelism.elastic=false")  # fmt: skip
    if layout.auto:
        raise ConfigError(f"{KEY} with parallelism=auto: a plan is for one number of ranks; plan without elastic, and "
                          "train with the degrees that gptlite plan prints")  # fmt: skip
    if data.handed_over:
        raise ConfigError(f"{KEY} with gptlite.initialize: a program divides its batches itself; use "
                          "parallelism.elastic=false, or gptlite train")  # fmt: skip
    if isinstance(optimizer, SGDConfig) and optimizer.adascale:
        raise ConfigError(f"{KEY} with optimizer.adascale=true: the learning rate would depend on the number of ranks, "
                          "whose gradients are compared; use adascale=false, or parallelism.elastic=false")  # fmt: skip
    if batch_schedule(data.global_batch_size, data.batch_ramp).measured:
        raise ConfigError(f"{KEY} with data.batch_ramp={data.batch_ramp}: the batch would depend on the number of "
                          "ranks, whose gradients are compared; give [first size, increment, samples], or use "
                          "parallelism.elastic=false")  # fmt: skip


# Here, as the package's __init__ is imported by processes that compose no configuration, and start quickly.
for each in (check_elastic, check_decisions, check_memory):
    if each not in CHECKS:
        CHECKS.append(each)
