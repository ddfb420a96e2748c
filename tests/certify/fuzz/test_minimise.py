"""A failing draw becomes the smallest that fails, in few tries, the same each time."""

from gptlite.satellites.certify.fuzz.axes import DEFAULT, overrides, world
from gptlite.satellites.certify.fuzz.draw import first_draws
from gptlite.satellites.certify.fuzz.legal import refusal
from gptlite.satellites.certify.fuzz.minimise import minimised

LARGE = next(
    draw for draw in first_draws(5, 200) if draw["zero"] and draw["norm"] and sum(map(bool, draw.values())) > 15
)


def test_only_what_the_failure_needs_is_left():
    tries = []

    def fails(draw):
        tries.append(draw)
        return bool(draw["zero"] and draw["norm"] and not refusal(overrides(draw)) and world(draw) > 1)

    smallest = minimised(LARGE, fails)
    left = {name: value for name, value in smallest.items() if value}
    assert left.keys() - {"zero", "norm"} <= {"data", "context"}  # one of them, or ZeRO has no ranks
    assert len(left) == 3
    assert world(smallest) == 2
    assert fails(smallest)
    assert len(tries) < 60
    assert minimised(LARGE, fails) == smallest


def test_degrees_are_lowered_where_they_cannot_be_left_out():
    draw = DEFAULT | {"data": "parallelism.data=8", "zero": "parallelism.zero=3", "seed": "seed=5"}
    smallest = minimised(draw, lambda each: bool(each["data"]) and each["data"] != "parallelism.data=2")
    assert {name: value for name, value in smallest.items() if value} == {"data": "parallelism.data=3"}


def test_a_draw_that_fails_only_whole_stays_whole():
    assert minimised(LARGE, lambda draw: draw == LARGE) == LARGE
