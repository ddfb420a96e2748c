"""Helpers of the benchmarks: timing, interleaved calls, checks of arguments, and separation from train.py's overrides.

This module does not import torch, since a benchmark may need to set up its process before importing torch.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from gptlite.config.command_line import parse_arguments
from gptlite.errors import ConfigError

T = TypeVar("T")


def seconds(call: Callable[[], Any]) -> float:
    """Return the duration of one call in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls: Mapping[str, Callable[[], T]], repeats: int, warm_up: int = 3) -> dict[str, list[T]]:
    """Return the results of interleaved calls, by name, without those of `warm_up` additional rounds at the start.

    Interleaving makes a drift of the machine's speed affect all calls equally.
    """
    results: dict[str, list[T]] = {name: [] for name in calls}
    for repeat in range(warm_up + repeats):
        for name, call in calls.items():
            result = call()
            if repeat >= warm_up:
                results[name].append(result)
    return results


def check_names(key: str, given: str, known: Iterable[str], several: bool = True) -> None:
    """Raise ConfigError if `given`, the value of the argument `key`, is not known. `several`: it is comma-separated."""
    if unknown := set(given.split(",") if several else [given]) - set(known):
        raise ConfigError(f"{key}={given}: {', '.join(unknown)} unknown; choose from {', '.join(known)}")


def own_arguments(schema: type[T], arguments: list[str], usage: str | None) -> tuple[T, list[str]]:
    """Return the tool's arguments, which are fields of `schema`, and the overrides of train.py. `--help` exits."""
    if {"-h", "--help"} & set(arguments):
        print((usage or "").strip())
        sys.exit(0)
    own = [each for each in arguments if each.partition("=")[0] in schema.__dataclass_fields__]  # type: ignore[attr-defined]
    return parse_arguments(schema, own), [each for each in arguments if each not in own]
