"""Whole sweeps: every way a cell can end, its own ranks, its place among the others."""

import json
import shlex
import sys
import time
from pathlib import Path

import pytest
from distributed.cells.commands import TRAIN, Start, losses

from gptlite.commands import train
from gptlite.config.saved import read_saved
from gptlite.satellites.sweep import job
from gptlite.satellites.sweep.folder import Record
from sweep.sweeps import SMALL, begun, records, statuses


@pytest.mark.parametrize(("more", "sweeps"), [([], True), (["hydra.mode=RUN"], False)])
def test_the_command_of_a_cell_starts_no_sweep(more: list[str], sweeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "+sweep=zero", "parallelism=ddp", *more])
    monkeypatch.setattr(train, "sweep", lambda *_: 3)
    monkeypatch.setattr(train, "jobs", lambda: 4)
    assert train.command() == (3 if sweeps else 4)


def test_a_sweep_tells_the_time_that_is_left() -> None:
    cells = [Record(number, "", [], status, wall_seconds=60.0) for number, status in enumerate(("ok", "ok", "failed"))]
    assert job.time_left(cells, 12) == "10 cells left, ETA 10m00s"  # the failed one runs again
    assert job.time_left(cells[:2], 2) == job.time_left([], 3) == job.time_left(cells, None) == ""


def test_a_running_cell_tells_its_last_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "0.log"
    with job.told(log, seconds=0.01):
        for text in ("banner\n", "step 1/9  loss 3\n", "step 2/9  loss\x1b 2\nsaved\n"):
            with log.open("a") as file:
                file.write(text)
            time.sleep(0.1)
    assert capfd.readouterr().err == "  step 1/9  loss 3\n  step 2/9  loss\\x1b 2\n"


@pytest.mark.slow
def test_every_way_a_cell_can_end(start: Start, tmp_path: Path) -> None:
    """A dozen GB of weights, heads that do not divide the width, a rate that diverges: the rest completes."""
    folder = tmp_path / "s"
    sweep = ["optimizer.clip_norm=0", "model.d_model=32,33,8192", "optimizer.lr=1e-3,1e30"]
    limit = "trainer.host_memory_limit=1.5"
    code, output, errors = start(TRAIN, "-m", *SMALL, *sweep, limit, f"hydra.sweep.dir={folder}").end(250)
    assert code == 1, errors  # for the crash alone
    assert statuses(folder) == ["ok", "failed", "pruned", "pruned", "out of memory", "out of memory"]
    found = records(folder)
    assert found[1].reason.startswith("diverged: ")
    assert found[2].reason.startswith("model.d_model=33 is not divisible by model.num_heads=2")
    assert found[4].reason.startswith("rank 0: host memory ran out: ")
    assert found[4].reason.endswith("iB (trainer.host_memory_limit=1.5 GiB)")
    assert [record.name for record in found][3:5] == ["d_model=33 lr=1e+30", "d_model=8192 lr=0.001"]
    assert [record.exit_code for record in found] == [0, 1, None, None, 1, 1]
    assert found[0].result["status"] == "done"
    assert json.loads((folder / "0-d_model32-lr0.001" / "result.json").read_text()) == found[0].result
    assert not list(folder.glob("2-*"))
    for name in ("sweep.csv", "sweep.html"):
        assert (folder / name).stat().st_size > 0
    assert all(record.reason in output for record in found if record.reason)
    assert f"{shlex.quote(TRAIN)} -m hydra.sweep.dir={folder}" in output
    # What goes on runs the failed one alone.
    code, output, errors = start(TRAIN, "-m", f"hydra.sweep.dir={folder}").end(120)
    assert (code, begun(output)) == (1, ["d_model=32 lr=1e+30"]), errors


@pytest.mark.slow
def test_layouts_have_worlds_of_their_own_and_train_alike(start: Start, tmp_path: Path) -> None:
    """What is pruned or out of memory is no failure; run.dir is the sweep's folder."""
    folder = tmp_path / "s"
    command = [*SMALL, "parallelism=single,zero1,tp2,tp4", f"run.dir={folder}", "logger=wandb", "logger.mode=disabled"]
    code, output, errors = start(TRAIN, "-m", *command).end(250)
    assert code == 0, errors
    assert statuses(folder) == ["ok", "ok", "ok", "pruned"]
    found = records(folder)
    assert [record.world_size for record in found] == [1, 2, 2, None]
    assert [record.layout for record in found] == ["one rank", "data 2 (zero 1)", "tensor 2", ""]
    assert found[3].reason == "model.num_heads=2 is not divisible by parallelism.tensor=4; try parallelism.tensor=1, 2"
    alone = losses(folder / "0-single")
    assert len(alone) == 3
    for name in ("1-zero1", "2-tp2"):
        assert losses(folder / name) == pytest.approx(alone, rel=1e-5)
    config = read_saved(folder / "2-tp2" / "config.yaml")
    assert (config.run.name, config.logger.group) == ("s-2-tp2", "s")  # type: ignore[attr-defined]
    assert "continue:" not in output
    assert output.count(found[3].reason) == 1  # said before the first cell, not after each
    lines = [line for line in output.splitlines() if "tail -f " not in line]  # which ends with a path
    assert max(len(line) for line in lines if line.startswith(("=", "*", " "))) == 80
    for words in ("== gptlite", "== results", "step 1/3"):
        assert words not in output
        assert words in (folder / "0-single" / "train.log").read_text()
        assert words in (folder / "records" / "0.log").read_text()
    # A cell is a run like others: its folder alone goes on with it.
    code, output, errors = start(TRAIN, f"run.dir={folder / '2-tp2'}", "trainer.max_steps=4").end(120)
    assert code == 0, errors
    assert "step 4/4" in output


@pytest.mark.slow
def test_a_preset_of_a_sweep_needs_no_flag_and_a_killed_rank_fails_its_cell(start: Start, tmp_path: Path) -> None:
    import os
    import signal

    folder = tmp_path / "s"
    sweep = ["+sweep=zero", "parallelism=ddp,tp2", "trainer.max_steps=100000", f"hydra.sweep.dir={folder}"]
    run = start(TRAIN, *SMALL, "checkpoint.interval=10", "trainer.log_interval=1000", *sweep)
    for number, name in enumerate(("0-ddp", "1-tp2")):
        run.until(folder / name / "checkpoints" / "latest", timeout=100)
        os.kill(run.rank(number), signal.SIGKILL)
    code, _, errors = run.end(60)
    assert code == 1
    assert statuses(folder) == ["failed", "failed"]
    assert records(folder)[1].reason.startswith("rank 1 was killed by SIGKILL"), errors
