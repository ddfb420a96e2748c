"""What ranks do in the tests of checkpoints in memory: each rank's process stands for a keeper, with shelves in it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from distributed.cells.steps import joined
from gptlite.config import load
from gptlite.satellites.elastic.memory import MemoryCheckpoints
from gptlite.satellites.elastic.parts import File
from gptlite.satellites.elastic.shelf import Shelf
from gptlite.start.pretrain import pretrain
from gptlite.trainer.state import TrainState

SHELVES: dict[tuple[str, int], Shelf] = {}


class Crash(RuntimeError):
    """Stands for the loss of a rank."""


@dataclass(frozen=True)
class Train:
    """A run. `shelf` names the shelves, `crash` is the step after which all ranks fail.
    `nodes` has the node of each rank, by default one of its own. `lost` are ranks whose shelf is new, `flipped` those
    of whose newest own record a bit is flipped, `torn` those of whose newest own record is not complete."""

    overrides: list[str]
    shelf: str
    crash: int | None = None
    nodes: list[str] | None = None
    replicas: int = 1
    lost: tuple[int, ...] = ()
    flipped: tuple[int, ...] = ()
    torn: tuple[int, ...] = ()
    hurt: tuple[int, ...] = field(default=(0,))  # places in which records are flipped or torn


def train(run: Train, world: int, name: str) -> Any:
    """Train; return the figures of the checkpoints in memory, or the crash as text."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        rank = int(os.environ.get("RANK", 0))
        shelf = shelf_of(run, rank)
        kept = MemoryCheckpoints.settled

        def settled(self: MemoryCheckpoints, state: TrainState) -> None:
            kept(self, state)
            if state.step == run.crash:
                self._wait(30)
                raise Crash

        seen: list[dict] = []
        figures = MemoryCheckpoints.figures
        config = load([*run.overrides, f"checkpoint.replicas={run.replicas}"])
        with (
            mock.patch.object(MemoryCheckpoints, "settled", settled),
            mock.patch.object(MemoryCheckpoints, "figures", lambda self: (seen.append(figures(self)), figures(self))[1]),
        ):
            try:
                assert pretrain(config, shelf=shelf).exit_code == 0
            except Crash:
                return "crash"
        return seen[-1]["memory_checkpoints"] if seen else {}


def shelf_of(run: Train, rank: int) -> Shelf:
    """The shelf of a rank, damaged as the run says."""
    key = run.shelf, rank
    node = run.nodes[rank] if run.nodes else f"n{rank}"
    if key not in SHELVES or rank in run.lost:
        if key in SHELVES:
            SHELVES[key].close()
        SHELVES[key] = Shelf.new(node, os.getpid(), run.replicas)
    if rank in (*run.flipped, *run.torn):
        for place in run.hurt:
            files = [File(descriptor) for descriptor in SHELVES[key].places[place]]
            records = [record for file in files for record in file.records()]
            newest = max(records, key=lambda record: record.name.step)
            if rank in run.torn:
                newest.whole[0] = 0
            else:
                newest.data[len(newest.data) // 2] ^= 4
    return SHELVES[key]
