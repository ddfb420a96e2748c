"""Caches of what many layouts of a search have in common, by what it depends on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

MOST = 4096  # answers that a function keeps; then it begins anew
P = ParamSpec("P")
R = TypeVar("R")


class Same:
    """A model's configuration as part of a key: dataclasses that can change have no hash.

    Two are equal if they hold the same object, or equal ones.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (self.value is other.value or self.value == other.value)


def cached(key: Callable[..., object], most: int = MOST) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keeps what a function returns, by what `key` makes of its arguments; `cache_clear` forgets it."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = dict[object, R]()

        @wraps(function)
        def answer(*args: P.args, **options: P.kwargs) -> R:
            its = key(*args, **options)
            if its not in known:
                found = function(*args, **options)
                if len(known) >= most:
                    known.clear()
                known[its] = found
            return known[its]

        answer.__dict__["cache_clear"] = known.clear
        return answer

    return decorate
