"""Ctrl-C and SIGTERM stop a sweep: the running cell saves, no other starts."""

import shlex
import signal
from pathlib import Path

import pytest
from distributed.cells.commands import TRAIN, Start

from sweep.sweeps import LONG_SECOND, begun, records, statuses, stopped_in_second


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), pytest.param(signal.SIGTERM, marks=pytest.mark.long)],
)
def test_a_signal_stops_the_sweep_and_it_goes_on(start: Start, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "s"
    run = stopped_in_second(start, folder)
    # Meanwhile nobody else may work in the folder.
    code, _, errors = start(TRAIN, *LONG_SECOND, f"hydra.sweep.dir={folder}").end(60)
    assert code == 2
    assert f"process {run.process.pid} on" in errors
    assert errors.count("\n") == 1
    run.process.send_signal(number)
    code, output, errors = run.end(60)
    assert code == 128 + number, errors
    assert statuses(folder) == ["ok", "interrupted"]
    assert output.count("== sweep: 2 of 3 cells: 1 ok, 1 interrupted ==") == 1
    assert f"{shlex.quote(TRAIN)} -m hydra.sweep.dir={folder}" in output
    step = records(folder)[1].result["step"]
    assert (folder / "1-max_steps1000" / "checkpoints" / f"step-{step:08d}" / "MANIFEST.json").exists()
    code, output, errors = start(TRAIN, *LONG_SECOND, f"hydra.sweep.dir={folder}").end(250)
    assert (code, begun(output)) == (0, ["max_steps=1000", "max_steps=3"]), errors
    run_folder = folder / "1-max_steps1000"
    assert f"resuming from {run_folder}/checkpoints/step-{step:08d}" in (run_folder / "train.log").read_text()
    assert statuses(folder) == ["ok", "ok", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", [".lock", "sweep.json"])
def test_a_signal_before_the_first_cell_starts(start: Start, tmp_path: Path, moment: str) -> None:
    """`moment`: the file that is there when it comes; .lock is before the sweep has written anything about cells."""
    folder = tmp_path / "s"
    run = start(TRAIN, *LONG_SECOND, f"hydra.sweep.dir={folder}")
    run.until(folder / moment)
    run.process.send_signal(signal.SIGTERM)
    code, _, errors = run.end(60)
    assert code == 143, errors
    assert "Traceback" not in errors
    kept = statuses(folder) if (folder / "sweep.json").exists() else []
    assert kept in ([], ["interrupted"])
