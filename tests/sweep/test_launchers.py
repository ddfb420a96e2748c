"""Several cells at once, in processes of other launchers than Hydra's own."""

import signal
from pathlib import Path

import pytest
from distributed.cells.commands import TRAIN, Start

from sweep.sweeps import SMALL, records, statuses

JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(JOBLIB, id="joblib", marks=pytest.mark.slow),
        pytest.param(("hydra/launcher=submitit_local",), id="submitit_local", marks=pytest.mark.long),
    ],
)
def test_cells_side_by_side(start: Start, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher[0].partition('=')[2].partition('_')[0]}_launcher")
    folder = tmp_path / "s"
    sweep = ["seed=1,2", "parallelism.tensor=1,3", f"hydra.sweep.dir={folder}"]
    code, output, errors = start(TRAIN, "-m", *SMALL, *sweep, *launcher).end(250)
    assert code == 0, errors
    assert statuses(folder) == ["ok", "pruned", "ok", "pruned"]
    assert [record.result["step"] for record in records(folder) if record.status == "ok"] == [3, 3]
    assert "4 cells" in output
    code, _, errors = start(TRAIN, "-m", f"hydra.sweep.dir={folder}").end(120)
    assert code == 0, errors


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), pytest.param(signal.SIGKILL, marks=pytest.mark.long)],
)
def test_cells_elsewhere_stop_with_the_sweep(start: Start, tmp_path: Path, number: int) -> None:
    """Both that run save; the third never starts. So too if the sweep is killed."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    folder = tmp_path / "s"
    sweep = ["seed=1,2,3", "trainer.max_steps=100000", "checkpoint.interval=10", f"hydra.sweep.dir={folder}"]
    run = start(TRAIN, "-m", *SMALL, "trainer.log_interval=1000", *sweep, *JOBLIB)
    run.until(*(folder / f"{cell}-seed{cell + 1}" / "checkpoints" / "latest" for cell in (0, 1)), timeout=150)
    run.process.send_signal(number)
    code, _, errors = run.process.wait(100), *run.process.communicate(timeout=100)
    assert code == (128 + number if number == signal.SIGTERM else -number), errors
    assert statuses(folder) == ["interrupted", "interrupted"]
    assert run.left() == []
