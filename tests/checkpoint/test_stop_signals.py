"""A signal at any moment of training: committed within 30 seconds, its exit code, and no number changed by it."""

import random
import signal
import time
from pathlib import Path

import pytest
from checkpoint.destruction.campaign import Lives, differing, quiet
from checkpoint.destruction.forks import shared_server
from checkpoint.destruction.lives import TINY, read_journal, wait_for
from marking import marked

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.store import step_folders, step_of

LIMIT = 30.0  # seconds from the signal to the end, the checkpoint committed
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 138}
MODES = {"sync": "checkpoint.async_save=false", "async": "checkpoint.async_save=true"}


class Stopped(Lives):
    """A run that is stopped again and again in `run`."""

    def __init__(self, folder: Path, seed: int, mode: str, interval: int = 3) -> None:
        super().__init__(shared_server(), folder)
        self.run, self.random = folder / "run", random.Random(seed)
        self.overrides = [*TINY, MODES[mode], f"checkpoint.interval={interval}", "checkpoint.keep=2"]

    def stop(self, name: str, times: int = 1) -> None:
        """Trains on, sends the signal at a random moment after the first step, so many times in a tenth of a second,
        and checks what is left."""
        (process,) = self.begin([*self.overrides, f"run.dir={self.run}"])
        reached = int(wait_for(self.journal(), "step "))
        time.sleep(self.random.uniform(0, 0.3))
        sent = time.monotonic()
        for _ in range(times):
            process.signal(getattr(signal, name))
            time.sleep(0.1 / times)
        assert process.wait(LIMIT) == CODES[name], process.text()[-2000:]
        assert time.monotonic() - sent < LIMIT
        (newest, *_) = step_folders(self.run / "checkpoints")
        found = Checkpointer(CheckpointConfig(keep=2), self.run).find("auto", quiet)
        assert found == newest
        steps = [int(rest) for word, rest, _ in read_journal(self.journal()) if word == "step"]
        assert step_of(newest) == steps[-1] >= reached, "the last step taken is not the one saved"
        assert list((self.run / "checkpoints").glob(".t*-*")) == []

    def check_numbers(self) -> None:
        """Finished, the run holds what an undisturbed one does."""
        (newest, *_) = step_folders(self.run / "checkpoints")
        length = f"trainer.max_steps={(step_of(newest) or 0) + 3}"
        for name in ("run", "whole"):
            assert self.live([*self.overrides, length, f"run.dir={self.folder / name}"]) == [0], self.said()[-2000:]
        ends = [step_folders(self.folder / name / "checkpoints")[0] for name in ("run", "whole")]
        assert differing(*ends) == []


@pytest.mark.parametrize(
    ("name", "mode"), marked([("SIGINT", "async"), ("SIGTERM", "sync"), ("SIGUSR1", "sync")], quick=1, slow=2)
)
def test_a_signal_saves(tmp_path, name, mode):
    stopped = Stopped(tmp_path, 0, mode, interval=1000)  # so that there is no save but for the signal
    stopped.stop(name)
    stopped.check_numbers()


def test_a_signal_that_comes_twice_saves(tmp_path):
    """As `timeout` sends it, to its command and then to the group, and launchers that pass on what all have had."""
    stopped = Stopped(tmp_path, 0, "sync", interval=1000)
    stopped.stop("SIGTERM", times=20)
    assert stopped.said().count("saving after this step") == 1


TEN = [*["SIGTERM"] * 9, "SIGUSR1"]
AGAIN = [("async", 0, TEN), ("sync", 2, ["SIGINT"] * 5), ("sync", 0, TEN), ("sync", 1, TEN), ("async", 1, TEN)]
AGAIN.append(("sync", 2, ["SIGUSR1"] * 5))


@pytest.mark.parametrize(("mode", "seed", "names"), marked(AGAIN, slow=2))
def test_every_one_of_many_signals_saves(tmp_path, mode, seed, names):
    stopped = Stopped(tmp_path, seed, mode)
    for name in names:
        stopped.stop(name)
    stopped.check_numbers()
