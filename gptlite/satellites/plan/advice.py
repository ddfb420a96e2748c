"""Advice after an out-of-memory failure: predicted memory by category, and overrides that are predicted to fit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from itertools import combinations, product
from typing import Any

import torch

from gptlite.config.batch import check_world
from gptlite.config.checks import check
from gptlite.config.cluster import ClusterConfig
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.metrics.console import format_bytes
from gptlite.parallelism.config import ActivationCheckpointing, Offload
from gptlite.parallelism.layout import divisors
from gptlite.precision import resolve_precision
from gptlite.satellites.plan.capacity import rank_memory
from gptlite.satellites.plan.local import assumed
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.planning import assumed_words, limited, running, with_planned_vocabulary, workload_of
from gptlite.satellites.plan.workload import RankBytes

SHOWN = 3  # sets of overrides in the advice
Change = dict[str, Any]  # new values of configuration keys


def advice_lines(config: Config, world: int) -> list[str]:
    """Return the lines of `memory_advice`, indented; an empty list if the memory cannot be predicted."""
    try:
        return [f"  {line}" for line in memory_advice(config, world)]
    except (ConfigError, ValueError):
        return []


def memory_advice(config: Config, world: int) -> list[str]:
    """Return two lines: the predicted memory of the fullest rank, and up to three sets of overrides that fit.

    If no set of overrides fits, the second line has the set that needs the least memory; without a legal change there
    is no second line. The limit of a rank is `trainer.host_memory_limit`, a GPU's memory, or an equal share of the
    machine's memory. Raises ConfigError if the configuration has no legal layout.
    """
    config, guessed = with_planned_vocabulary(config)
    here = limited(assumed(), config, world)
    rank, taken = _taken(config, world, here)
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in asdict(taken).items() if name != "host")
    lines = [f"predicted memory of pipeline rank {rank}: {format_bytes(taken.total)} ({listed}), and about "
             f"{here.reserved_gib:g} GiB for libraries{assumed_words(config.model, guessed)}"]  # fmt: skip
    changes = _changes(config, world, here)
    if fitting := _mildest([each for each in changes if each[1] <= rank_memory(here, world)]):
        return [*lines, f"overrides that are predicted to fit: {'; '.join(map(_words, fitting))}"]
    if not changes:
        return lines
    least = _words(min(changes, key=lambda each: each[1]))
    none = "no override that was tried is predicted to fit; the least memory"
    return [*lines, f"{none}: {least}; use more ranks or a smaller model"]


def _taken(config: Config, world: int, cluster: ClusterConfig) -> tuple[int, RankBytes]:
    """Return the pipeline rank that needs the most memory, and its bytes."""
    work = workload_of(config, check_world(config, world), cluster)
    policy = resolve_precision(config.precision, torch.device(cluster.device))
    return most(running(work, config, policy))


def _changes(config: Config, world: int, cluster: ClusterConfig) -> list[tuple[Change, int]]:
    """Return the legal changes of one key, then of two and three keys, each with the resulting bytes of the fullest
    rank. The values of a key are ordered from the smallest change to the largest."""
    layout, parallelism = check_world(config, world), config.parallelism
    micro = workload_of(config, layout, cluster).micro_batch_size
    keeps = parallelism.activation_checkpointing is ActivationCheckpointing.none
    recomputed = [ActivationCheckpointing.selective, ActivationCheckpointing.full]
    offloads = cluster.device != "cpu" and parallelism.offload is Offload.none
    # A key that cannot be changed further has no values.
    values: dict[str, list[Any]] = {
        "data.micro_batch_size": divisors(micro)[-2::-1],
        "parallelism.activation_checkpointing": recomputed if keeps else [],
        "parallelism.zero": list(range(parallelism.zero + 1, 4)) if layout.data_size > 1 else [],
        "parallelism.offload": ([Offload.cpu] if offloads else []),
    }
    changes: list[Change] = [
        dict(zip(keys, chosen, strict=True))
        for number in (1, 2, 3)
        for keys in combinations(values, number)
        for chosen in product(*(values[key] for key in keys))
    ]
    legal = []
    for change in changes:
        changed = config
        for key, value in change.items():
            section, _, name = key.partition(".")
            changed = replace(changed, **{section: replace(getattr(changed, section), **{name: value})})
        with suppress(ConfigError):  # an illegal combination
            check(changed)
            legal.append((change, _taken(changed, world, cluster)[1].total))
    return legal


def _mildest(fitting: list[tuple[Change, int]]) -> list[tuple[Change, int]]:
    """Return the mildest of the changes, all of which fit; at most SHOWN.

    The first change of each set of keys comes first, unless a subset of its overrides fits too. Other changes follow.
    """
    mildest: dict[frozenset[str], tuple[Change, int]] = {}
    for change in fitting:
        keys, items = frozenset(change[0]), change[0].items()
        if keys not in mildest and not any(each.items() < items for each, _ in fitting):
            mildest[keys] = change
    others = (change for change in fitting if change not in mildest.values())
    return [*mildest.values(), *others][:SHOWN]


def _words(change: tuple[Change, int]) -> str:
    words = " ".join(f"{key}={getattr(value, 'value', value)}" for key, value in change[0].items())
    return f"{words} ({format_bytes(change[1])})"
