"""Bounded caches for intermediate results that many layouts of a search share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

MOST = 4096  # results that a function keeps; its cache is cleared when it is full
P = ParamSpec("P")
R = TypeVar("R")


class Same:
    """A model configuration as part of a cache key; mutable dataclasses have no hash of their own.

    Two instances are equal if they wrap the same object or equal objects.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (self.value is other.value or self.value == other.value)


def cached(key: Callable[..., object], most: int = MOST) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that caches a function's results under `key` of its arguments. `cache_clear` empties the
    cache."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = dict[object, R]()

        @wraps(function)
        def answer(*args: P.args, **options: P.kwargs) -> R:
            entry = key(*args, **options)
            if entry not in known:
                found = function(*args, **options)
                if len(known) >= most:
                    known.clear()
                known[entry] = found
            return known[entry]

        answer.__dict__["cache_clear"] = known.clear
        return answer

    return decorate
