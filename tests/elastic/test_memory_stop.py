"""One process: a run that a signal stops is in memory as well as on disk, and steps that are taken back are not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
from run_files import differing, step_folder

from gptlite.config import load
from gptlite.satellites.elastic.memory import MemoryCheckpoints
from gptlite.satellites.elastic.parts import File
from gptlite.satellites.elastic.shelf import Shelf
from gptlite.start.pretrain import pretrain
from gptlite.trainer.signals import StopSignal
from gptlite.trainer.state import TrainState


def steps(shelf: Shelf) -> set[int]:
    return {each.name.step for place in shelf.places for file in place for each in File(file).records()}


@pytest.fixture
def shelf():
    shelf = Shelf.new("here", os.getppid(), 0)
    yield shelf
    shelf.close()


def test_a_run_that_a_signal_stops_repeats_no_step(tiny: list[str], shelf: Shelf, tmp_path: Path):
    run = [*tiny, "checkpoint.memory_interval=2", "checkpoint.interval=0", f"run.dir={tmp_path / 'run'}"]
    settled = MemoryCheckpoints.settled

    def stopping(self: MemoryCheckpoints, state: TrainState) -> None:
        settled(self, state)
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(MemoryCheckpoints, "settled", stopping):
        assert pretrain(load(run), stop_signal=StopSignal(), shelf=shelf).exit_code == 128 + signal.SIGTERM
    assert steps(shelf) == {2, 3}
    assert step_folder(tmp_path / "run", 3).exists()

    assert pretrain(load(run), shelf=shelf).exit_code == 0
    log = (tmp_path / "run" / "train.log").read_text()
    assert "restored step 3 from memory of node here" in log
    assert log.count("(a new run)") == 1
    assert "checkpoints in memory: every 2 steps" in log
    assert pretrain(load([*tiny, f"run.dir={tmp_path / 'whole'}", "checkpoint.interval=0"])).exit_code == 0
    assert differing(tmp_path / "whole", tmp_path / "run", 8) == []


def test_steps_that_are_taken_back_are_dropped(tiny: list[str], shelf: Shelf, tmp_path: Path):
    run = [*tiny, "checkpoint.memory_interval=2", "checkpoint.interval=0", f"run.dir={tmp_path}"]
    before, seen = MemoryCheckpoints.before, []

    def back(self: MemoryCheckpoints, state: TrainState) -> None:
        step = state.step
        if step == 5:
            self._wait(30)
            state.step = 3
        before(self, state)
        state.step = step
        seen.append(steps(shelf))

    with mock.patch.object(MemoryCheckpoints, "before", back):
        assert pretrain(load(run), shelf=shelf).exit_code == 0
    assert seen[5] == {2}  # step 4 is gone
