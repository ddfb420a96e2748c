"""Nodes of an elastic run: numbers that stay, who is lost and who is back, and the words on it."""

from __future__ import annotations

import os
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

STEP = struct.Struct("<qd")  # the last step of a rank, and when it has ended, in seconds since 1970


class Pulse:
    """Last step of a rank, in a file that outlives its process: a write takes a microsecond."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, step: int, time: float) -> None:
        """Note the end of a step."""
        os.pwrite(self._descriptor, STEP.pack(step, time), 0)

    def read(self) -> tuple[int, float]:
        """Return the last step and the time of its end; (0, 0.0) before the first."""
        packed = os.pread(self._descriptor, STEP.size, 0)
        return STEP.unpack(packed) if packed else (0, 0.0)


@dataclass(frozen=True)
class Roster:
    """Numbers of the nodes that have taken part, by the token of each node's keeper, and the last world.

    `present` are the numbers of the nodes of this world, `degrees` the words on its layout, `config` its configuration.
    `start` counts the worlds.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    present: list[int] = field(default_factory=list)
    degrees: dict[str, int] = field(default_factory=dict)
    config: str = ""
    start: int = 0

    def notes(self) -> dict[str, Any]:
        """Return the JSON value from which `of` makes the same roster."""
        return asdict(self)

    @classmethod
    def of(cls, notes: Any) -> Roster:
        """Return the roster in a node's notes, an empty one if there is none."""
        return cls(**notes["roster"]) if isinstance(notes, dict) and "roster" in notes else cls()


@dataclass(frozen=True)
class Member:
    """Message of a rank to the others at a meeting: its node, the roster it knows, its last step, and why it has ended.

    `lost` is the time, in seconds since 1970, at which it has noticed the end of the last world; None if that ended in
    order. `gone` says how an earlier process of this rank has ended.
    """

    node: str
    step: int
    time: float
    lost: float | None
    why: str
    gone: str
    roster: Roster


def merged(members: list[Member]) -> Roster:
    """Return the roster of a new world. The newest roster counts; a new node gets the lowest number that no node of
    this world has, so that a node which has been lost, and comes back with a new keeper, has its number again."""
    newest = max((member.roster for member in members), key=lambda roster: roster.start)
    tokens = list(dict.fromkeys(member.node for member in members))
    numbers = {token: newest.numbers[token] for token in tokens if token in newest.numbers}
    for token in tokens:
        if token not in numbers:
            numbers[token] = next(n for n in range(len(tokens)) if n not in numbers.values())
    present = sorted(numbers[token] for token in tokens)
    absent = {token: n for token, n in newest.numbers.items() if n not in present}
    return Roster({**absent, **numbers}, present, newest.degrees, newest.config, newest.start + 1)


@dataclass(frozen=True)
class WorldChange:
    """Difference of two worlds: the nodes lost and back, the last step before, its cause and its time.

    `loss` is the time of the first loss, in seconds since 1970; None if the last world has ended in order. `ended` is
    the time of the last step.
    """

    lost: list[int]
    back: list[int]
    failed: list[int]  # nodes that are present again, of which a rank has ended
    step: int
    why: str
    loss: float | None
    ended: float = 0.0

    @classmethod
    def of(cls, members: list[Member], roster: Roster) -> WorldChange:
        """Return what has changed from the newest roster that the members know."""
        before = max((member.roster for member in members), key=lambda each: each.start).present
        stayed = [member for member in members if roster.numbers[member.node] in before]  # others have been told lost
        times = [member.lost for member in stayed if member.lost is not None]
        reasons = [member.why for member in stayed if member.why]
        gone = {roster.numbers[member.node]: member.gone for member in stayed if member.gone}
        return cls(
            lost=[number for number in before if number not in roster.present],
            back=[number for number in roster.present if number not in before],
            failed=sorted(gone),
            step=max(members, key=lambda member: member.time).step,
            # What a watch has seen comes before what the sockets of others say.
            why=next(iter([*gone.values(), *sorted(reasons, key=lambda why: "heartbeat" not in why)]), ""),
            loss=min(times) if times else None,
            ended=max(member.time for member in members),
        )

    @property
    def cause(self) -> str:
        """Why the last world has ended."""
        if self.why or self.loss is not None:
            return self.why or "connection lost"
        return "nodes came" if self.back else "asked to stop"

    def words(self, degrees: dict[str, tuple[int, int]], nodes: int) -> str:
        """Return a line such as `node 5 lost at step 4,812 (killed); 7 nodes go on: data 32 -> 28`.

        `degrees` are the last world's and this world's, `nodes` the number of nodes.
        """
        cause = f" ({self.why})" if self.why else ""
        if self.lost:
            first = f"{_nodes(self.lost)} {'left' if self.loss is None else 'lost'} at step {self.step:,}{cause}"
        elif self.failed:
            first = f"a rank of {_nodes(self.failed)} lost at step {self.step:,}{cause}"
        elif self.loss is not None:
            first = f"connection lost at step {self.step:,}{cause}"
        else:
            first = ""
        back = f"{_nodes(self.back)} back at step {self.step:,}" if self.back else ""
        start = "; ".join(filter(None, [first, back])) or f"started anew at step {self.step:,}"
        rest = ", ".join(f"{name} {a} -> {b}" if a != b else f"{name} {b}" for name, (a, b) in degrees.items())
        go_on = f"{nodes} node{'s go' if nodes > 1 else ' goes'} on"
        return f"{start}; {go_on}: {rest}" if first else f"{start}: {rest}"


def _nodes(numbers: list[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
