"""Several ranks from the command line, with real training: killed, stopped, going on, in a sweep."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from checkpoint.destruction.lives import TINY as LITTLE
from marking import marked
from run_files import read_metrics

from distributed.cells.commands import TRAIN, Start, losses
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.store import step_folders, step_of
from gptlite.start.rank import START


def check_two_ranks(folder: Path, code: int, output: str, errors: str, expected: dict[int, float]) -> None:
    assert (code, errors) == (0, "")
    assert output.count("step 8/8") == 1
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    assert (folder / "ranks" / "rank-1.log").exists()


def test_two_ranks_from_the_command_line(tiny: list[str], tmp_path: Path, whole: Callable) -> None:
    done = forked.run(TRAIN, *tiny, "parallelism.tensor=2", f"run.dir={tmp_path / 'a'}", folder=tmp_path)
    check_two_ranks(tmp_path / "a", done.returncode, done.stdout, done.stderr, whole())


@pytest.fixture
def decoy(tmp_path: Path) -> None:
    """Another gptlite where the command is given, which is not taken for the package."""
    (tmp_path / "gptlite").mkdir()
    (tmp_path / "gptlite" / "__init__.py").touch()


@pytest.mark.slow
@pytest.mark.usefixtures("decoy")
def test_two_new_processes_from_the_command_line(
    start: Start, tiny: list[str], tmp_path: Path, whole: Callable
) -> None:
    ended = start(TRAIN, *tiny, "parallelism.tensor=2", f"run.dir={tmp_path / 'a'}").end()
    check_two_ranks(tmp_path / "a", *ended, whole())


@pytest.mark.usefixtures("decoy")
def test_a_new_rank_imports_the_package_of_its_launcher(tmp_path: Path) -> None:
    """The program of a rank, but for its last line."""
    *lines, last = START.splitlines()
    assert last == "main(sys.argv[1:])"
    code = "\n".join([*lines, "print(main.__code__.co_filename)"])
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{Path(TRAIN).parent / 'gptlite' / 'start' / 'rank.py'}\n"


@pytest.mark.parametrize("victim", marked([0, 1], slow=1))
def test_a_killed_rank_trains_on_within_a_minute(
    start: Start, tiny: list[str], run: Callable, tmp_path: Path, victim: int
) -> None:
    """Where the run itself came from, another run's weights, is not where it goes on."""
    assert run("other", "trainer.max_steps=2")[0] == 0
    weights = [f"checkpoint.resume={tmp_path / 'other'}", "checkpoint.load=weights"]
    common = [*weights, "trainer.max_steps=100", "checkpoint.interval=25", "parallelism.tensor=2"]
    folder, uninterrupted = tmp_path / "a", tmp_path / "b"
    assert start(TRAIN, *tiny, *common, f"run.dir={uninterrupted}").end()[0] == 0
    command = start(TRAIN, *tiny, *common, "trainer.max_restarts=1", f"run.dir={folder}")
    command.until(folder / "checkpoints" / "step-00000025")
    os.kill(command.rank(victim), signal.SIGKILL)
    killed, rows = time.monotonic(), len(read_metrics(folder))
    command.wait_for(lambda: len(read_metrics(folder)) >= rows + 2, 60 - (time.monotonic() - killed))
    code, output, errors = command.end()
    assert code == 0, errors
    assert f"rank {victim} was killed by SIGKILL" in errors
    assert "resuming from" in output
    assert losses(folder) == losses(uninterrupted)


@pytest.mark.parametrize("number", marked([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], slow=1))
def test_a_signal_saves_and_the_run_goes_on(start: Start, tiny: list[str], tmp_path: Path, number: int) -> None:
    folder, uninterrupted = tmp_path / "a", tmp_path / "b"
    common = ["trainer.max_steps=100", "checkpoint.interval=25", "parallelism.tensor=2"]
    assert start(TRAIN, *tiny, *common, f"run.dir={uninterrupted}").end()[0] == 0
    command = start(TRAIN, *tiny, *common, f"run.dir={folder}")
    command.until(folder / "checkpoints" / "step-00000025")
    command.process.send_signal(number)
    code, output, errors = command.end()
    assert code == 128 + number, errors
    assert "stopped: signal" in output
    step = max(losses(folder))
    assert (folder / "checkpoints" / f"step-{step:08d}" / "MANIFEST.json").exists()
    code, _, errors = start(TRAIN, f"run.dir={folder}").end()
    assert code == 0, errors
    assert losses(folder) == losses(uninterrupted)


@pytest.mark.parametrize("layout", marked(["parallelism=single", "parallelism=ddp parallelism.data=2"], slow=1))
def test_a_signal_at_any_moment_is_answered_in_30_seconds(start: Start, tmp_path: Path, layout: str) -> None:
    run, limit = tmp_path / "run", 30.0
    for seed in range(2):
        before = max(losses(run)) if run.exists() else 0
        command = start(TRAIN, *LITTLE, *layout.split(), f"run.dir={run}", "checkpoint.interval=3")
        command.until(run / "metrics.jsonl")
        command.wait_for(lambda before=before: max(losses(run), default=0) > before + 1, 120)
        time.sleep(random.Random(seed).uniform(0, 0.5))
        sent = time.monotonic()
        command.process.send_signal(signal.SIGTERM)
        code, _, errors = command.end(limit)
        assert code == 143, errors
        assert time.monotonic() - sent < limit
        (newest, *_) = step_folders(run / "checkpoints")
        assert Checkpointer(CheckpointConfig(), run).find("auto") == newest
        assert step_of(newest) == max(losses(run))


@pytest.mark.slow
def test_a_killed_rank_without_restarts(start: Start, tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "a"
    common = ["trainer.max_steps=100000", "checkpoint.interval=25", "parallelism.tensor=2"]
    command = start(TRAIN, *tiny, *common, f"run.dir={folder}")
    command.until(folder / "checkpoints" / "step-00000025")
    os.kill(command.rank(1), signal.SIGKILL)
    killed = time.monotonic()
    code, _, errors = command.end()
    assert time.monotonic() - killed < 15
    assert code == 1
    assert errors.startswith("rank 1 was killed by SIGKILL")


@pytest.mark.slow
def test_ranks_run_the_code_of_the_command(start: Start, tiny: list[str], tmp_path: Path) -> None:
    """Not that of another checkout, which may be the one installed."""
    other, here = tmp_path / "other", Path(TRAIN).parent
    for folder in ("gptlite", "conf"):
        shutil.copytree(here / folder, other / folder)
    shutil.copy(TRAIN, other)
    with (other / "gptlite" / "launch" / "worker.py").open("a") as file:
        file.write("\nprint('the other checkout')\n")
    code, output, errors = start(str(other / "train.py"), *tiny, "parallelism.tensor=2", "trainer.max_steps=2").end()
    assert (code, errors) == (0, "")
    assert "the other checkout\n" in output
