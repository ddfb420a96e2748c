"""An elastic run under srun: a job that Slurm starts again with fewer tasks goes on with their data degree."""

import os
import signal
import time
from pathlib import Path

import pytest
from elastic.nodes import TINY
from run_files import read_metrics

from distributed.cells.commands import TRAIN, Run, Start, free_port
from gptlite.start.api import launch
from gptlite.start.load import load

STEPS, INTERVAL = 14, 4


def losses(run: Path) -> dict[int, float]:
    """Losses of the last start that has trained each step."""
    return {row["step"]: row["loss"] for row in read_metrics(run) if "loss" in row}


def srun(start: Start, tasks: int, *overrides: str) -> list[Run]:
    """Start one process for each task, with the variables of srun in a job that was requeued under its number."""
    shared = {"NTASKS": tasks, "TASKS_PER_NODE": tasks, "STEP_ID": 0, "JOB_ID": 41, "JOB_NODELIST": "localhost"}
    port = {"MASTER_PORT": free_port()}
    places = [shared | {"PROCID": rank, "LOCALID": rank} for rank in range(tasks)]
    return [start(TRAIN, *overrides, env=port | {f"SLURM_{k}": str(v) for k, v in each.items()}) for each in places]


@pytest.mark.slow
def test_a_requeued_job_with_fewer_tasks_goes_on_with_the_same_losses(start: Start, tmp_path: Path):
    run = tmp_path / "run"
    words = [*TINY, f"trainer.max_steps={STEPS}", f"checkpoint.interval={INTERVAL}"]
    command = [*words, "parallelism.data=elastic", "parallelism.zero=2", f"run.dir={run}"]
    ranks = srun(start, 3, *command)
    deadline = time.monotonic() + 100
    while not (run / "checkpoints/step-00000008").exists():
        assert time.monotonic() < deadline, [rank.end() for rank in ranks]
        time.sleep(0.02)
    os.kill(ranks[2].process.pid, signal.SIGKILL)  # Slurm then ends the step, and starts the job again
    assert 0 not in [rank.end()[0] for rank in ranks]
    assert [rank.end()[0] for rank in srun(start, 2, *command)] == [0, 0]
    assert "data 2" in (run / "train.log").read_text().rpartition("== gptlite =")[2]
    assert launch(load([*words, f"run.dir={tmp_path / 'alone'}"])).exit_code == 0
    whole, found = losses(tmp_path / "alone"), losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert [found[step] for step in whole] == pytest.approx([whole[step] for step in whole], rel=1e-6)
