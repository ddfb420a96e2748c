"""Identification of stalled ranks from heartbeats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from gptlite.documents import DocumentError, parse_json
from gptlite.progress import format_duration
from gptlite.satellites.monitor.stack_sampling import Place

SHOWN = 4  # maximum number of ranks described individually


@dataclass(frozen=True)
class Heartbeat:
    """Status of a rank: its training step (0: none), its main thread's position, and the seconds spent there.

    `beat` counts the rank's heartbeats, and `time` is the time of this heartbeat in seconds since 1970.
    """

    rank: int
    host: str
    pid: int
    beat: int
    time: float
    step: int
    place: Place
    stood: float

    def encoded(self) -> bytes:
        """Return the heartbeat as JSON, for the other ranks."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decoded(message: bytes) -> Heartbeat | None:
        """Return the heartbeat that a rank has encoded; None for anything else."""
        try:
            return parse_json(message, Heartbeat)
        except DocumentError:
            return None

    @property
    def who(self) -> str:
        """Return e.g. `rank 3 (node7, pid 4711)`."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def where(self) -> str:
        """Return e.g. `step 12, backward, in ...`."""
        return f"step {self.step}, {self.place.words}" if self.step else self.place.words


def judge(before: Sequence[Heartbeat | None], beats: Sequence[Heartbeat | None], now: float) -> str:
    """Return a message that names the stalled ranks.

    `beats` are the latest heartbeats. `before` are heartbeats so old that every rank should have sent a new one; both
    have None for a rank that has sent none. Ranks without a new heartbeat are stalled; if all ranks have sent one, the
    ranks that do not wait for others are stalled. `now` is in seconds since 1970.
    """
    known = [beat for beat in beats if beat is not None]
    silent = silent_ranks(before, beats)
    stalled = silent or [beat for beat in known if not beat.place.waits]
    missing = [rank for rank, beat in enumerate(beats) if beat is None]
    parts = [
        f"{beat.who} has sent no heartbeat for {format_duration(max(now - beat.time, 0))}; last position: {beat.where}"
        if silent
        else f"{beat.who} has stalled the others for {format_duration(beat.stood)}; position: {beat.where}"
        for beat in stalled[:SHOWN]
    ]
    if len(stalled) > SHOWN:
        parts.append(f"also {rank_words(beat.rank for beat in stalled[SHOWN:])}")
    if missing and not silent:
        parts.append(f"no heartbeat yet from {rank_words(missing)}")
    places: dict[str, list[int]] = {}
    for beat in known:
        if beat.place.waits == "collective" and beat not in stalled:
            places.setdefault(beat.place.waiting_for, []).append(beat.rank)
    if places:
        waiting = (
            f"{rank_words(ranks)} wait{'s' if len(ranks) == 1 else ''} in {place}" for place, ranks in places.items()
        )
        parts.append(", ".join(waiting))
    if not stalled and not missing:
        parts.append("no rank is behind: all ranks wait for each other, or the network between them has failed")
    return "; ".join(parts)


def silent_ranks(before: Sequence[Heartbeat | None], beats: Sequence[Heartbeat | None]) -> list[Heartbeat]:
    """Return the last heartbeats of ranks that have sent no new one: their process is stopped, or their machine is
    down."""
    return [beat for old, beat in zip(before, beats, strict=True) if old and beat and old.beat == beat.beat]


def rank_words(ranks: Iterable[int]) -> str:
    """Format rank numbers as `rank 4` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(texts)}"
