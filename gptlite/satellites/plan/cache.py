"""Bounded caches of intermediate results that many layouts of a search share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from gptlite.models.config import ModelConfig
from gptlite.models.registry import spec_of

MOST = 4096  # default number of results in a cache; a full cache is cleared
P = ParamSpec("P")
R = TypeVar("R")


class Same:
    """Hashable wrapper of a configuration, for cache keys; mutable dataclasses are not hashable.

    Two wrappers are equal if their configurations are the same object or compare equal.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(type(self.value))  # equal configurations have the same type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (self.value is other.value or self.value == other.value)


def same_model(model: ModelConfig) -> tuple[object, ...]:
    """Return a model's configuration as a cache key. The number of blocks is hashed too, since a search for the largest
    model caches results for hundreds of models that differ only in it."""
    return Same(model), getattr(model, spec_of(model).blocks_key, None)


def cached(key: Callable[..., object], most: int = MOST) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that caches at most `most` results of a function.

    `key` maps the function's arguments to the cache key. The decorated function's `cache_clear` empties the cache.
    """

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
