"""Seconds of calls, and of calls in turn. No torch here: a benchmark may have to set up its process before."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def seconds(call: Callable[[], Any]) -> float:
    """The time that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(calls: Mapping[str, Callable[[], T]], repeats: int, warm_up: int = 3) -> dict[str, list[T]]:
    """What each call returns, in turn, so that a drift of the machine's speed meets all alike; first ones left out."""
    found: dict[str, list[T]] = {name: [] for name in calls}
    for repeat in range(warm_up + repeats):
        for name, call in calls.items():
            result = call()
            if repeat >= warm_up:
                found[name].append(result)
    return found
