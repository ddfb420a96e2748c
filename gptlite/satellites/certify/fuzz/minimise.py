"""The smallest configuration that still fails: values reset to their defaults, several at once and then one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gptlite.satellites.certify.fuzz.axes import AXES, DEGREES, Draw, effective, number

Fails = Callable[[Draw], bool]


def minimised(draw: Draw, fails: Fails) -> Draw:
    """Return a draw without a value that could be reset or a degree that could be lowered, one at a time, and fail.

    As in delta debugging (Zeller and Hildebrandt 2002), halves of the values are reset first, then quarters, and so on.
    `fails` runs the draw, so that each call can take seconds. The result depends on it and on the draw alone.
    """
    draw = dict(draw)
    size = max(1, len(_values(draw)) // 2)
    while True:
        smaller = next((each for each in _without(draw, size) if fails(each)), None)
        if smaller is not None:
            draw = smaller
        elif size > 1:
            size //= 2
        else:
            lower = next((each for each in _lowered(draw) if fails(each)), None)
            if lower is None:
                return draw
            draw = lower


def _values(draw: Draw) -> list[str]:
    """Return the axes that are not at their default; those that make a run small and change little come first."""
    return [name for name in reversed(AXES) if draw[name]]


def _without(draw: Draw, size: int) -> Iterator[Draw]:
    """Yield the draw with `size` of its values reset, neighbours in the grammar."""
    values = _values(draw)
    for start in range(0, len(values), size):
        changed = effective(draw | dict.fromkeys(values[start : start + size], ""))
        if changed != draw:
            yield changed


def _lowered(draw: Draw) -> Iterator[Draw]:
    """Yield the draw with a smaller degree or number of micro-batches."""
    for name in (*DEGREES, "accumulation", "replicate", "expert"):
        below = [each for each in AXES[name].values if 1 < number({name: each}, name) < number(draw, name)]
        for value in sorted(below, key=lambda each: number({name: each}, name)):
            yield effective(draw | {name: value})
