"""Which of a test's cases run when: the first ones always or in `-m slow`, the rest in `-m long`."""

from collections.abc import Callable, Sequence
from itertools import chain, product, repeat
from typing import Any

import pytest


def marked(values: Sequence[Any], quick: int = 0, slow: int = 0, name: Callable[[Any], str] | None = None) -> list[Any]:
    """The values for parametrize, `quick` of them unmarked, the next `slow` ones slow; a tuple is several arguments."""
    marks = chain(repeat((), quick), repeat((pytest.mark.slow,), slow), repeat((pytest.mark.long,)))
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), id=name and name(value), marks=mark)
        for value, mark in zip(values, marks, strict=False)
    ]


def combinations(*axes: Sequence[Any], first: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """All combinations of the axes' values, those of `first` at the front."""
    every = list(product(*axes))
    assert set(first) <= set(every)
    return [*first, *(each for each in every if each not in first)]
