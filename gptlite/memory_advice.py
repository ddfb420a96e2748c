"""What took the memory where it ran out, and which overrides would have fitted, by the plan's arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import combinations, product

import torch

from gptlite.checks import check, check_world
from gptlite.config import Config
from gptlite.errors import ConfigError
from gptlite.metrics.console import format_bytes
from gptlite.parallelism.config import ActivationCheckpointing, Offload
from gptlite.parallelism.layout import divisors
from gptlite.plan.config import ClusterConfig
from gptlite.plan.local import assumed
from gptlite.plan.memory import most
from gptlite.plan.room import rank_memory
from gptlite.plan.workload import RankBytes
from gptlite.planning import assumed_words, with_planned_vocabulary, workload_of
from gptlite.precision import resolve_precision

SHOWN = 3


@dataclass(frozen=True)
class Change:
    """Overrides, and what the fullest rank would take with them."""

    overrides: tuple[str, ...]
    bytes: int


def advice_lines(config: Config, world: int) -> list[str]:
    """The lines of `memory_advice`, indented; none where the plan cannot say."""
    try:
        return [f"  {line}" for line in memory_advice(config, world)]
    except (ConfigError, ValueError):
        return []


def memory_advice(config: Config, world: int) -> list[str]:
    """Two lines: what the fullest rank takes, and up to three ways to take less. Raises ConfigError if none is legal.

    A rank has `trainer.host_memory_limit`, a GPU's memory, or its part of the machine's.
    """
    here = assumed()
    config, guessed = with_planned_vocabulary(config)
    limit = config.trainer.host_memory_limit
    if limit is not None and here.device == "cpu":
        here = replace(here, memory_gib=limit * world)
    room, (rank, taken) = rank_memory(here, world), _taken(config, world, here)
    names = [item.name for item in fields(RankBytes) if item.name != "host"]
    listed = ", ".join(f"{name} {format_bytes(getattr(taken, name))}" for name in names)
    lines = [f"by the plan rank {rank} takes {format_bytes(taken.total)}: {listed}; and the process itself about "
             f"{here.reserved_gib:g} GiB{assumed_words(config.model, guessed)}"]  # fmt: skip
    changes = list(_changes(config, world, here))
    if fitting := _mildest([change for change in changes if change.bytes <= room]):
        return [*lines, f"what would have fitted: {'; '.join(map(_words, fitting))}"]
    if not changes:
        return lines
    least = min(changes, key=lambda change: change.bytes)
    return [*lines, f"nothing here would have fitted; the least: {_words(least)}; more ranks cut the model further"]


def _taken(config: Config, world: int, cluster: ClusterConfig) -> tuple[int, RankBytes]:
    """The fullest rank, and its bytes."""
    work = workload_of(config, check_world(config, world), cluster)
    policy = resolve_precision(config.precision, torch.device(cluster.device))
    return most(replace(work, dtype=policy.name))


def _changes(config: Config, world: int, cluster: ClusterConfig) -> Iterator[Change]:
    """Each single change, then two and three together, of each key the mildest value first."""
    layout = check_world(config, world)
    micro = workload_of(config, layout, cluster).micro_batch_size
    offloads = cluster.device != "cpu" and config.parallelism.offload is Offload.none
    values = {
        "data.micro_batch_size": [size for size in reversed(divisors(micro)) if size < micro],
        "parallelism.activation_checkpointing": [
            mode for mode in (ActivationCheckpointing.selective, ActivationCheckpointing.full)
            if config.parallelism.activation_checkpointing is ActivationCheckpointing.none
        ],
        "parallelism.zero": [
            stage for stage in (1, 2, 3) if layout.data_size > 1 and stage > config.parallelism.zero
        ],
        "parallelism.offload": [Offload.cpu] if offloads else [],
    }  # fmt: skip
    keys = [key for key, options in values.items() if options]
    for number in (1, 2, 3):
        for chosen in combinations(keys, number):
            for options in product(*(values[key] for key in chosen)):
                if change := _change(config, dict(zip(chosen, options, strict=True)), world, cluster):
                    yield change


def _change(config: Config, choice: dict[str, object], world: int, cluster: ClusterConfig) -> Change | None:
    """None where it is not legal."""
    changed = config
    for key, value in choice.items():
        section, _, name = key.partition(".")
        changed = replace(changed, **{section: replace(getattr(changed, section), **{name: value})})
    try:
        check(changed)
        taken = _taken(changed, world, cluster)[1]
    except ConfigError:
        return None
    return Change(tuple(f"{key}={getattr(value, 'value', value)}" for key, value in choice.items()), taken.total)


def _mildest(fitting: list[Change]) -> list[Change]:
    """Of each set of keys the first, unless some of its overrides would do; of too few such, others that fit too."""
    found: dict[frozenset[str], Change] = {}
    for change in fitting:
        keys = frozenset(each.partition("=")[0] for each in change.overrides)
        if keys not in found and not any(set(each.overrides) < set(change.overrides) for each in fitting):
            found[keys] = change
    others = (change for change in fitting if change not in found.values())
    return [*found.values(), *others][:SHOWN]


def _words(change: Change) -> str:
    return f"{' '.join(change.overrides)} ({format_bytes(change.bytes)})"
