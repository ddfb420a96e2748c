"""The largest model that `gptlite plan largest=true` finds for this machine trains here; a tenth more does not."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gptlite.commands.plan import planned_config
from gptlite.config.schema import CONF_DIR
from gptlite.satellites.plan.largest import largest_models
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.report import train_command, write_largest

ROOT = CONF_DIR.parent
GIVEN = """
parallelism=single data=synthetic data.vocab_size=500 data.num_tokens=20000 model=gpt2 model.vocab_size=500
data.sequence_length=64 model.sequence_length=64 data.global_batch_size=1 precision=fp32 trainer.host_memory_limit=3
""".split()
SHORT = "trainer.max_steps=3 checkpoint.interval=0 trainer.eval_interval=0 trainer.sample_tokens=0".split()


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, str(ROOT / "train.py"), *words, *SHORT, f"run.dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, capture_output=True, text=True, timeout=280, env=environment)


@pytest.mark.long
def test_the_pick_runs_and_a_tenth_more_does_not(tmp_path: Path) -> None:
    config = planned_config(GIVEN)
    cluster, (best, *_) = largest_models(config, lambda _: None)
    words = shlex.split(train_command(config, cluster, best.work, best.override))[2:]
    done = run(tmp_path / "pick", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    layers = best.layers
    while (
        most(replace(best.work, model=replace(best.work.model, num_layers=layers)))[1].total < 1.1 * best.memory.total
    ):
        layers += 1
    done = run(tmp_path / "more", *words[:-1], f"model.num_layers={layers}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "host memory ran out" in done.stdout + done.stderr


def test_the_picture_has_a_bar_for_each_layout(tmp_path: Path) -> None:
    node = ("cluster=dgx-h100", "cluster.devices_per_node=2", "cluster.memory_gib=3", "data.global_batch_size=4")
    cluster, found = largest_models(planned_config([*GIVEN[1:], *node]), lambda _: None)
    assert len(found) > 2
    picture = write_largest(cluster, found, tmp_path / "out", 3)
    three = picture.read_bytes()
    assert three[:4] == b"\x89PNG"
    height = int.from_bytes(three[20:24], "big")
    assert int.from_bytes(write_largest(cluster, found, tmp_path / "out", 1).read_bytes()[20:24], "big") < height
