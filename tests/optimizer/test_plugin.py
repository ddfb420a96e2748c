"""An optimizer of one's own, in one file that nothing else names: `plugins=[signum] optimizer=signum`."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from optimizer.signum import SignumConfig
from plan.truth import workload
from plan.truth_layouts import Layout
from run_files import read_metrics

from gptlite.config import CONF_DIR
from gptlite.errors import ConfigError
from gptlite.optimizer.config import OPTIMIZERS, LionConfig, SGDConfig
from gptlite.optimizer.registry import register_optimizer
from gptlite.parallelism.config import Offload
from gptlite.plan.memory import estimate
from gptlite.plan.parameters import num_parameters

TRAIN = str(CONF_DIR.parent / "train.py")
OWN = "plugins=[signum] optimizer=signum data=synthetic data.num_tokens=20000 precision=fp32 run.dir=run"
SMALL = "model.num_layers=2 model.num_heads=2 model.d_model=32 data.sequence_length=32 data.global_batch_size=4"
QUIET = "schedule=constant trainer.log_interval=1 trainer.eval_interval=0 trainer.sample_tokens=0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).parent / "signum.py", tmp_path / "signum.py")
    return tmp_path


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, TRAIN, *words]
    return subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=240, env=environment)


def test_it_trains_and_goes_on_on_two_ranks(folder):
    done = command(folder, *OWN.split(), *SMALL.split(), *QUIET.split(), "trainer.max_steps=3")
    assert done.returncode == 0, done.stderr
    done = command(folder, "run.dir=run", "trainer.max_steps=6", "parallelism=zero2", "parallelism.data=2")
    assert done.returncode == 0, done.stderr + done.stdout
    losses = [row["loss"] for row in read_metrics(folder / "run") if "loss" in row]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_its_values_are_checked_before_anything_runs(folder):
    done = command(folder, *OWN.split(), "optimizer.momentum=1.5")
    assert done.returncode == 2
    assert "optimizer.momentum=1.5 must be in [0, 1), e.g. 0.9" in done.stderr
    assert not (folder / "run").exists()


def test_the_planner_counts_its_state():
    """A moment, as Lion's and SGD's, in memory and in files."""
    work = workload(Layout(1, "").config(), 1)
    assert estimate(replace(work, optimizer=SignumConfig()), 0).optimizer == 4 * num_parameters(work.model)
    files = replace(work, parallelism=replace(work.parallelism, offload=Offload.nvme))
    for each in (work, files):
        mine = estimate(replace(each, optimizer=SignumConfig()), 0).optimizer
        assert mine > 0
        assert mine == estimate(replace(each, optimizer=LionConfig()), 0).optimizer
        assert mine == estimate(replace(each, optimizer=SGDConfig()), 0).optimizer


def test_a_name_is_taken_once():
    register_optimizer("signum", SignumConfig)
    with pytest.raises(ConfigError, match=r"an optimizer adamw is there already, of gptlite\.optimizer\.config"):
        register_optimizer("adamw", SignumConfig)
    assert OPTIMIZERS["signum"] is SignumConfig
