"""What ranks do in the tests of checkpoints in memory: each rank's process stands for a keeper, with shelves in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from distributed.cells.compare import same_bits
from distributed.cells.reshard import COUNTERS, drawn, fill, filled, held
from distributed.cells.steps import joined

from gptlite.config import Config, load
from gptlite.parallelism.mesh import build_mesh
from gptlite.satellites.elastic.copies import Copies
from gptlite.satellites.elastic.disk import write_to_disk
from gptlite.satellites.elastic.exchange import hand_over
from gptlite.satellites.elastic.memory import MemoryCheckpoints, drop
from gptlite.satellites.elastic.parts import File, KeptPart
from gptlite.satellites.elastic.shelf import Shelf
from gptlite.satellites.parity.gather import gather
from gptlite.start.pretrain import pretrain
from gptlite.trainer.build import Run
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.state import TrainState

SHELVES: dict[str, Shelf] = {}  # of this rank, by test


class Crash(RuntimeError):
    """Stands for the loss of a rank."""


@dataclass(frozen=True)
class Damage:
    """What happens to shelves: of the ranks `lost` they are new; in the `places` of the ranks `flipped` a bit of the
    newest record is flipped, in those of the ranks `torn` it is not complete."""

    lost: Sequence[int] = ()
    flipped: Sequence[int] = ()
    torn: Sequence[int] = ()
    places: Sequence[int] = (0,)


NONE = Damage()


@dataclass(frozen=True)
class Recalled:
    """The restored step, None if it was not from memory; the keys of wrong tensors; the log of rank 0."""

    step: int | None
    wrong: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


def shelf_of(key: str, config: Config, nodes: Sequence[str] | None, damage: Damage = NONE) -> Shelf:
    """The shelf of a rank, by default on a node of its own."""
    rank = int(os.environ.get("RANK", 0))
    if key not in SHELVES or rank in damage.lost:
        if key in SHELVES:
            SHELVES.pop(key).close()
        SHELVES[key] = Shelf.new(nodes[rank] if nodes else f"n{rank}", os.getpid(), config.checkpoint.replicas)
    for place in damage.places if rank in (*damage.flipped, *damage.torn) else ():
        newest = max(records(SHELVES[key], place), key=lambda record: record.name.step)
        if rank in damage.torn:
            newest.whole[0] = 0
        else:
            newest.data[len(newest.data) // 2] ^= 4
    return SHELVES[key]


def records(shelf: Shelf, *places: int) -> list[KeptPart]:
    """The complete records in places of a shelf, by default in all."""
    chosen = places or range(len(shelf.places))
    return [record for i in chosen for descriptor in shelf.places[i] for record in File(descriptor).records()]


def attached(
    config: Config, state: TrainState, mesh: Any, shelf: Shelf, *reached: int
) -> tuple[MemoryCheckpoints, bool, RunFolder]:
    """The checkpoints in memory of a state, and whether they have filled it."""
    memory, folder = MemoryCheckpoints(config, shelf), RunFolder(config, mesh)
    run = mock.create_autospec(Run, instance=True, config=config, mesh=mesh, state=state)
    return memory, memory.recall(run, folder, *reached), folder


def keep(
    config: Config, world: int, name: str, key: str, steps: Sequence[int], nodes: Sequence[str] | None = None
) -> list[tuple[int, int]] | None:
    """Save states with known values, one for each step. Gives the steps and parts that this rank's shelf then holds."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        mesh = build_mesh(config.parallelism)
        state = filled(config, mesh, "")
        shelf = shelf_of(key, config, nodes)
        memory, _, folder = attached(config, state, mesh, shelf)
        with closing(state.loader), closing(folder.checkpointer), closing(memory):
            for key, value in COUNTERS.items():
                setattr(state, key, value)
            for step in steps:
                state.step = step
                fill(state, f"step {step}")
                memory.before(state)
                memory._save(state)
                memory._wait(60)
                assert memory._work is not None
                memory._work.result()
        return sorted((record.name.step, record.rank) for record in records(shelf))


def recall(config: Config, world: int, name: str, key: str, damage: Damage = NONE, *reached: int) -> Recalled | None:
    """Restore a state of other values from memory, and compare it."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        mesh = build_mesh(config.parallelism)
        state = filled(config, mesh, "other")
        log: list[str] = []
        with ExitStack() as stack:
            stack.callback(state.loader.close)
            stack.enter_context(mock.patch.object(RunFolder, "log", lambda self, text: log.append(text)))
            memory, found, folder = attached(config, state, mesh, shelf_of(key, config, None, damage), *reached)
            stack.enter_context(closing(folder.checkpointer))
            stack.enter_context(closing(memory))
            wholes = gather(held(state)) or {}
            if not found:
                return Recalled(None, log=log)
            step, masters = state.step, config.precision.master_weights
            assert {**COUNTERS, "step": step} == {key: state.meta()[key] for key in COUNTERS}
            wrong = []
            for key, whole in wholes.items():
                saved = drawn(key, whole.value.shape, f"step {step}")
                saved = saved if masters or not key.startswith("model.") else saved.bfloat16().float()
                wrong += [key] if not same_bits(whole.value, saved) or bool(whole.disagreements) else []
            return Recalled(step, wrong, log)


def give(config: Config, world: int, name: str, key: str, active: int) -> list[tuple[int, int]] | None:
    """Hand over. Gives the steps and parts that this rank's shelf then holds."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        hand_over(SHELVES[key], active)
        return sorted((record.name.step, record.rank) for record in records(SHELVES[key]))


def forget(config: Config, world: int, name: str, key: str, after: int) -> None:
    """Drop the records of later steps."""
    if key in SHELVES:
        drop(SHELVES[key], after)


def write(config: Config, world: int, name: str, key: str, damage: Damage) -> tuple[Path | None, list[str]] | None:
    """Write a checkpoint on disk. Gives its folder and the log."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        log: list[str] = []
        return write_to_disk(shelf_of(key, config, None, damage), config, log.append), log


def train(overrides: list[str], world: int, name: str, key: str, crash: int | None = None, hung: int = 0) -> Any:
    """Train; give the figures of the checkpoints in memory, "crash" after the step at which all ranks fail. From step
    `hung` on, the last rank sends no copies until it has ended."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        config = load(overrides)
        settled, swap, figures = MemoryCheckpoints.settled, Copies.swap, MemoryCheckpoints.figures
        seen: list[dict] = []
        ends = threading.Event()

        def crashing(self: MemoryCheckpoints, state: TrainState) -> None:
            settled(self, state)
            if state.step == crash:
                self._wait(30)
                raise Crash

        def hanging(self: Copies, *arguments: Any) -> None:
            if hung and world > 1 and dist.get_rank() == world - 1 and seen_step[0] >= hung:
                ends.wait(60)
            swap(self, *arguments)

        def noting(self: MemoryCheckpoints, state: TrainState) -> None:
            seen_step[0] = state.step
            crashing(self, state)

        def ending(self: MemoryCheckpoints) -> dict:
            ends.set()
            seen.append(figures(self))
            return seen[-1]

        seen_step = [0]
        ended = MemoryCheckpoints.ended
        with (
            mock.patch.object(MemoryCheckpoints, "settled", noting),
            mock.patch.object(MemoryCheckpoints, "ended", lambda self, state: (ends.set(), ended(self, state))[1]),
            mock.patch.object(MemoryCheckpoints, "figures", ending),
            mock.patch.object(Copies, "swap", hanging),
        ):
            try:
                assert pretrain(config, shelf=shelf_of(key, config, None)).exit_code == 0
            except Crash:
                return "crash"
        return seen[-1]["memory_checkpoints"]
