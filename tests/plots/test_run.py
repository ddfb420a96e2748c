"""A command plots a run when it ends, in a folder that the core has written."""

import json
from pathlib import Path

import pytest

from gptlite.config import load
from gptlite.launch.elastic import Ended
from gptlite.satellites.plots import run as plots
from gptlite.start import run
from gptlite.start.run import drawn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with two steps of a mixture of experts."""
    rows = [{"step": step, "loss": 4.0 - step, "expert_loads": [[3, step], [2, 4]]} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_run_that_ended_is_plotted_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn(folder, 0)
    assert capsys.readouterr().out == f"curves:    {folder / 'curves.png'}\nexpert loads: {folder / 'experts.png'}\n"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    drawn(folder, 0)
    assert capsys.readouterr().out == ""  # nothing new


def test_a_run_that_was_stopped_is_plotted_and_one_that_failed_is_not(folder: Path) -> None:
    drawn(folder, 1)
    assert not (folder / "curves.png").exists()
    drawn(folder, 128 + 15)
    assert (folder / "curves.png").exists()


@pytest.mark.parametrize("killed", [False, True])
def test_ranks_that_a_second_signal_killed_leave_no_plot(
    folder: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Ended(128 + 2, killed=killed)
    monkeypatch.setattr(run.launcher, "start_ranks", lambda *_: ended)
    monkeypatch.setattr(run, "predicted", lambda *_: "")
    assert run.start_ranks(load(["data=synthetic", f"run.dir={folder}"]), 2, 0.0) is ended
    assert (folder / "curves.png").exists() is not killed


def test_a_run_without_a_step_has_no_plot(tmp_path: Path) -> None:
    assert plots.plot_run(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val_loss": 4.0}\n')
    assert plots.plot_run(tmp_path) == {}


def test_a_plot_that_fails_is_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "plot_curves", fail)
    drawn(folder, 0)
    assert capsys.readouterr().out.startswith("warning: the run was not plotted: ")
