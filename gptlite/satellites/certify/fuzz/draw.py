"""Draws of the fuzz: legal configurations in which each legal pair of values meets early, then random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product

from gptlite.satellites.certify.fuzz.axes import (
    AXES,
    DEFAULT,
    DEGREES,
    LARGEST_WORLD,
    MODEL_AXES,
    Draw,
    effective,
    number,
    overrides,
    world,
)
from gptlite.satellites.certify.fuzz.legal import refusal
from gptlite.satellites.certify.fuzz.refusals import cause

Value = tuple[str, str]  # axis, overrides
Pair = tuple[Value, Value]
TRIES = 40  # of one pair, before it counts as one that cannot be legal
CANDIDATES = 6  # legal draws of which the one with the most new pairs is taken
MOST_WORK = 3.0, 4.0, 6.0, 6.0, 12.0, 24.0  # blocks that a rank runs, one of which is the limit of a draw


def every_pair() -> set[Pair]:
    """Return all pairs of values of different axes, legal or not."""
    return {
        ((a.name, x), (b.name, y)) for a, b in combinations(AXES.values(), 2) for x, y in product(a.values, b.values)
    }


def pairs_of(draw: Draw) -> set[Pair]:
    """Return the pairs of values that a draw tries together."""
    return set(combinations(draw.items(), 2))


def work(draw: Draw) -> float:
    """Return about how long a draw takes, in blocks that a rank runs forward and backward once."""
    layers = int(draw["layers"].rpartition("=")[2] or 2)
    again = {"": 1.0, "full": 1.5, "selective": 3.0, "offload": 1.5}[draw["checkpointing"].rpartition("=")[2]]
    split = 2.0 if draw["checkpointing"] and draw["schedule"].endswith(("zbv", "zero_bubble")) else 1.0
    ranks = max(1.0, world(draw) / 4)
    return layers / number(draw, "pipeline") * number(draw, "accumulation") * again * split * ranks


@dataclass
class Drawing:
    """Draws of a seed, one after the other, the same ones on every machine with these checks.

    `refused` collects the draws that the checks have refused on the way, with their messages, for the refusal check.
    `missing` has the pairs that no draw has met yet, and `impossible` those that no draw can meet, with the last
    message. Draws come in groups of `layouts_per_model` with the same model, whose one-process run they share.
    """

    seed: int
    ranks: int = LARGEST_WORLD  # of a draw, at most
    layouts_per_model: int = 4
    missing: set[Pair] = field(default_factory=every_pair)
    impossible: dict[Pair, str] = field(default_factory=dict)
    refused: dict[str, Draw] = field(default_factory=dict)
    met: set[Pair] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._limit = max(MOST_WORK)

    def __iter__(self) -> Iterator[Draw]:
        """Yield draws without end, each of several ranks and not yielded before."""
        drawn: set[tuple[str, ...]] = set()
        while True:
            first = self._next(self._pinned())
            for draw in filter(None, (first, *self._with_model(first))):
                if (key := tuple(draw.values())) not in drawn:
                    drawn.add(key)
                    self.met |= (new := pairs_of(draw))
                    self.missing -= new
                    yield draw

    def _pinned(self) -> Draw:
        """Return the values of a pair that is still missing, or nothing once all have been met."""
        while self.missing:
            pair = self._random.choice(sorted(self.missing))
            if (draw := self._completed(dict(pair), TRIES)) is not None:
                return draw
            self.missing.discard(pair)
        return {}

    def _next(self, first: Draw) -> Draw | None:
        """Return the best of some legal draws: `first`, if it is one, or random ones."""
        return self._best([first or None, *(self._completed({}, TRIES) for _ in range(CANDIDATES))])

    def _best(self, draws: Sequence[Draw | None]) -> Draw | None:
        """Return the draw with the most pairs that are missing; None if there is no draw."""
        return max(filter(None, draws), key=lambda draw: len(pairs_of(draw) & self.missing), default=None)

    def _with_model(self, draw: Draw | None) -> Iterator[Draw | None]:
        """Yield draws with the same model on other layouts."""
        if draw is None:
            return
        kept = {name: draw[name] for name in MODEL_AXES}
        for _ in range(self.layouts_per_model - 1):
            yield self._best([self._completed(kept, TRIES) for _ in range(CANDIDATES // 2)])

    def _completed(self, pinned: Draw, tries: int) -> Draw | None:
        """Return a legal draw with these values; None if no try is legal.

        A refused try is mended by drawing anew what its message names.
        """
        message = "needs more ranks, or has no effect"
        share = self._random.choice((0.15, 0.4, 0.7))  # of axes that leave their default
        draw = self._filled(pinned, share)
        for attempt in range(tries):
            self._limit = self._random.choice(MOST_WORK)
            if self._fits(draw, pinned):
                message = refusal(overrides(draw))
                if not message:
                    return draw
                self.refused.setdefault(cause(message), dict(draw))
                self._mend(draw, pinned, message)
                draw = effective(draw) | pinned
            if attempt % 8 == 7 or not self._fits(draw, pinned):
                draw = self._filled(pinned, share if attempt < tries // 2 else 0.0)
        if len(pinned) == 2:
            first, second = sorted(pinned.items(), key=lambda item: list(AXES).index(item[0]))
            self.impossible[first, second] = message
        return None

    def _fits(self, draw: Draw, pinned: Draw) -> bool:
        """Return True if a draw has several ranks, not too many, and the pinned values have an effect."""
        fits = 2 <= world(draw) <= self.ranks and work(draw) <= self._limit
        return fits and effective(draw) == draw == draw | pinned

    def _filled(self, pinned: Draw, share: float) -> Draw:
        """Return random values around the pinned ones, each other than its default with a probability of `share`."""
        draw = DEFAULT | pinned
        for name in self._random.sample(sorted(AXES), len(AXES)):
            if name not in pinned and name not in DEGREES and self._random.random() < share:
                draw[name] = self._random.choice(AXES[name].values)
        for name in dict.fromkeys(each for axis in pinned if pinned[axis] for each in AXES[axis].on):
            if not effective(draw)[name] and name not in pinned:
                draw[name] = self._random.choice(AXES[name].values)
        self._degrees(draw, pinned)
        return effective(draw) | pinned

    def _degrees(self, draw: Draw, pinned: Draw) -> None:
        """Draw degrees of up to `ranks` ranks, mostly of four and fewer."""
        most = min(self.ranks, self._random.choice((2, 2, 2, 2, 3, 4, 4, 4, 4, LARGEST_WORLD)))
        for name in self._random.sample(DEGREES, len(DEGREES)):
            if name not in pinned:
                others = world(draw | {name: ""})
                fit = [each for each in AXES[name].values if others * number({name: each}, name) <= most]
                draw[name] = self._random.choice(fit or [""])

    def _mend(self, draw: Draw, pinned: Draw, message: str) -> None:
        """Draw anew one of the axes that a message names, or all that are not pinned if it names none."""
        named = [
            name
            for name, value in draw.items()
            if name not in pinned and any(each.partition("=")[0] in message for each in (*value.split(), KEYS[name]))
        ]
        name = self._random.choice(named or sorted(AXES.keys() - pinned))
        draw[name] = self._random.choice(("", self._random.choice(AXES[name].values)))


KEYS = {axis.name: axis.values[1].split()[0].partition("=")[0] for axis in AXES.values()}
KEYS |= {"accumulation": "data.micro_batch_size"}


def first_draws(seed: int, count: int) -> list[Draw]:
    """Return the first draws of a seed."""
    return list(islice(Drawing(seed), count))
