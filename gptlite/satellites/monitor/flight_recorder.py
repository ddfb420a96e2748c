"""Reader of the process groups' flight recorder, which records collectives."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from gptlite.parallelism.axes import WORLD, every_axis
from gptlite.torch_private.flight_recorder import recorded_collectives, time_collectives

READ_SECONDS = 30.0


class RecordedTime:
    """Share of time that GPUs spend in collectives, by mesh axis, whether or not overlapped with computation.

    It is read from the recorder's buffer of the last 2,000 collectives. If there were more since the previous read, it
    is an estimate from those in the buffer.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        for group in groups:
            time_collectives(group)
        self._since = time.time()
        self._shares: dict[str, float] = {}

    def shares(self) -> dict[str, float]:
        """Return the shares between the last two reads of the buffer. A read costs up to 0.1 s, so its result is kept
        for READ_SECONDS, unless it is empty."""
        now = time.time()
        if not self._shares or now - self._since >= READ_SECONDS:
            self._shares, self._since = shares_of(recorded_collectives(active=False), self._since, now), now
        return self._shares


def shares_of(entries: Sequence[dict[str, Any]], since: float, now: float) -> dict[str, float]:
    """Return `{axis: share}`: the share of the time from `since` to `now`, in seconds since 1970, that the recorded
    collectives took."""
    done = [entry for entry in entries if entry.get("duration_ms") and entry["time_created_ns"] / 1e9 >= since]
    if not done:
        return {}
    # The ring buffer may have dropped the oldest entries; measure from the first that is left.
    since = max(since, min(entry["time_created_ns"] for entry in done) / 1e9)
    shares: dict[str, float] = {}
    for entry in done:
        axis = axis_of_entry(entry)
        shares[axis] = shares.get(axis, 0.0) + entry["duration_ms"] / 1000 / max(now - since, 1e-9)
    return shares


def oldest_under_way() -> tuple[str, str] | None:
    """Return the name and the mesh axis of the longest-running collective on this rank, e.g. `("all_reduce", "tp")`;
    None if none is in progress.

    The axis is "world" for a group of all ranks. Point-to-point messages over gloo are not recorded.
    """
    entries = [entry for entry in recorded_collectives(active=True) if not entry.get("retired")]
    if not entries:
        return None
    first = min(entries, key=lambda entry: entry["record_id"])
    return first["profiling_name"].partition(":")[2], axis_of_entry(first)


def axis_of_entry(entry: dict[str, Any]) -> str:
    """Return the mesh axis of a recorded collective, from DeviceMesh's group description, such as `mesh_tp`."""
    _, _, axis = entry["process_group"][1].partition("mesh_")
    return next((each.kind for each in every_axis() if each.name == axis), axis) or WORLD
