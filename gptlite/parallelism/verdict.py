"""Who keeps the others waiting, in one line, from what each rank has said of itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from gptlite.parallelism.axes import every_axis

SHOWN = 4  # ranks described one by one


@dataclass(frozen=True)
class Word:
    """What a rank says of itself: who it is, the training step it takes (0: it does not train), and where it stands.

    `beat` counts its words and `time` is when it said this one, in seconds of the epoch. `waits`, `collective`, `axis`
    and `words` are as in `stack.Place`; `since` is for how many seconds it has stood there.
    """

    rank: int
    host: str
    pid: int
    beat: int
    time: float
    step: int
    waits: str
    collective: str
    axis: str
    words: str
    since: float

    @staticmethod
    def read(text: str) -> Word:
        """What `str` wrote."""
        return Word(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def who(self) -> str:
        """`rank 3 (node7, pid 4711)`."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def where(self) -> str:
        """`step 12, backward, in ...`."""
        return f"step {self.step}, {self.words}" if self.step else self.words

    @property
    def waiting_for(self) -> str:
        """`all_reduce over tp`."""
        nameless = next((axis.waits for axis in every_axis() if axis.kind == self.axis), "a collective")
        return f"{self.collective or nameless} over {self.axis}"


@dataclass(frozen=True)
class Verdict:
    """The line, and the ranks that have fallen silent: stopped, or on a machine that has gone."""

    text: str
    silent: tuple[Word, ...] = ()


def judge(before: Sequence[Word | None], words: Sequence[Word | None], now: float) -> Verdict:
    """Who is to blame, from the ranks' words and those of a while before, in which each should have spoken again.

    A rank that has not is the one; else those that do not wait for others. `now` is in seconds of the epoch. None is a
    rank that has not said anything yet.
    """
    known = [word for word in words if word is not None]
    silent = [word for old, word in zip(before, words, strict=True) if old and word and old.beat == word.beat]
    guilty = silent or [word for word in known if not word.waits]
    waiting = [word for word in known if word.waits == "collective" and word not in guilty]
    missing = [rank for rank, word in enumerate(words) if word is None]
    parts = []
    for word in guilty[:SHOWN]:
        if word in silent:
            age = max(now - word.time, 0)
            parts.append(f"{word.who} has said nothing for {age:.0f} s; its last word: {word.where}")
        else:
            parts.append(f"{word.who} keeps the others waiting: for {word.since:.0f} s {word.where}")
    if len(guilty) > SHOWN:
        parts.append(f"and so {rank_words(word.rank for word in guilty[SHOWN:])}")
    if missing and not silent:
        parts.append(f"nothing yet from {rank_words(missing)}")
    parts.append(waiting_words(waiting))
    if not guilty and not missing:
        parts.append("none is behind: they wait for each other, or the network between them fails")
    return Verdict("; ".join(part for part in parts if part), tuple(silent))


def waiting_words(words: Iterable[Word]) -> str:
    """`ranks 0-2 wait in all_reduce over tp, rank 5 waits in recv over pp`."""
    places: dict[str, list[int]] = {}
    for word in words:
        places.setdefault(word.waiting_for, []).append(word.rank)
    parts = [f"{rank_words(ranks)} wait{'s' * (len(ranks) == 1)} in {place}" for place, ranks in places.items()]
    return ", ".join(parts)


def rank_words(ranks: Iterable[int]) -> str:
    """`rank 4`, `ranks 0-2, 5`."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"
