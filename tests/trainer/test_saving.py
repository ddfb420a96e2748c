"""What the loop makes of saves: beside the training they hold the same, and one that fails ends the run in words."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run_files import differing, read_metrics

from gptlite.checkpoint import store
from gptlite.checkpoint.manifest import verify
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.start.pretrain import pretrain


def test_saves_beside_the_training_hold_what_the_others_do(run, tmp_path: Path) -> None:
    options = ("checkpoint.interval=2", "checkpoint.keep=0", "model.dropout=0.1", "optimizer.lr=0.01")
    assert run("sync", *options)[0] == 0
    assert run("async", *options, "checkpoint.async_save=true")[0] == 0
    for step in (2, 4, 6, 8):
        assert differing(tmp_path / "sync", tmp_path / "async", step) == []
    log = (tmp_path / "async" / "train.log").read_text()
    assert log.count("saved step-0000000") == 4
    assert json.loads((tmp_path / "async" / "result.json").read_text())["checkpoint"].endswith("step-00000008")


class FullFrom:
    """A disk that is full once `step` is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        original = os.fsync

        def fsync(descriptor: int) -> None:
            if f"/.tmp-step-{step:08d}" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSPC, "No space left on device")
            original(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(
    "beside", [pytest.param("false", id="sync"), pytest.param("true", id="async", marks=pytest.mark.slow)]
)
def test_a_full_disk_ends_the_run_in_one_line(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, beside: str
) -> None:
    with monkeypatch.context() as patch:
        FullFrom(patch, 4)
        code, _ = run("a", "checkpoint.interval=2", "trainer.max_steps=100000", f"checkpoint.async_save={beside}")
    assert code == 1
    (left,) = store.step_folders(tmp_path / "a" / "checkpoints")
    assert left.name == "step-00000002"
    verify(left, print)
    assert list(left.parent.glob(".tmp*")) == []
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "No space left on device" in line
    assert f"the last one, {left}, is intact; fix the problem, and run the same command again" in line
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["status"] == "failed: " + line.removeprefix("error: ")
    last = max(row["step"] for row in read_metrics(tmp_path / "a") if "loss" in row)
    assert last == 4 if beside == "false" else 4 <= last < 1000
    code, _ = run("a", "checkpoint.interval=2", "trainer.max_steps=6")
    assert code == 0


def test_no_room_for_one_checkpoint_is_known_before_the_first_step(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load([*tiny, f"run.dir={tmp_path / 'a'}", "run.name=a"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("usage", (), {"free": 10_000}))
    with pytest.raises(
        ConfigError, match=r"run\.dir=\S+a: a checkpoint takes 0\.\d MB, but only 0\.0 MB are free; free some, or"
    ):
        pretrain(config)
    assert not (tmp_path / "a").exists()


def test_little_room_is_said(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 600_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("usage", (), {"free": 3 * size}))
    assert run("a", "trainer.max_steps=2", "checkpoint.keep=5")[0] == 0
    assert "too little for the 6 checkpoints that checkpoint.keep=5 needs" in (tmp_path / "a" / "train.log").read_text()
