"""A run by our kernels, by the references, and on a machine that cannot compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_files import read_metrics, snapshot

from gptlite.config import CONF_DIR

TRAIN = CONF_DIR.parent / "train.py"
# The first 50 of 100 warm-up steps to 1e-3: Adam makes a whole step of rounding noise where a gradient is tiny.
FIFTY = ("trainer.max_steps=50", "optimizer.lr=5e-4", "schedule.warmup_steps=49", "trainer.sample_tokens=0")


@pytest.mark.parametrize(
    ("fused", "reference"),
    [
        (("ops=fused",), ("ops=reference",)),
        (("ops=fused", "model.dropout=0.1"), ("ops=reference", "model.dropout=0.1")),
        pytest.param(("ops=fused", "ops.attention=fused_softmax"), ("ops=reference",), marks=pytest.mark.slow),
        pytest.param(("ops=fused", "model.bias=false"), ("ops=reference", "model.bias=false"), marks=pytest.mark.slow),
        pytest.param(("ops=fused", "optimizer=adam"), ("ops=reference", "optimizer=adam"), marks=pytest.mark.slow),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_fifty_steps_are_the_same_to_rounding(run, tmp_path: Path, fused, reference) -> None:
    curves = []
    for name, overrides in (("fused", fused), ("reference", reference)):
        assert run(name, *FIFTY, *overrides)[0] == 0
        curves.append([(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name) if "loss" in row])
    assert len(curves[0]) == 50
    for ours, theirs in zip(*curves, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_banner_names_the_kernel_that_sdpa_takes(run, tmp_path: Path) -> None:
    options = ("trainer.max_steps=2", "ops.attention=sdpa", "model.dropout=0.1", "precision=fp32")
    assert run("a", *options)[0] == 0
    words = " ".join((tmp_path / "a" / "train.log").read_text().split())  # the banner wraps
    assert "SDPA uses flash for float32 heads of" in words
    assert "; dropout writes the scores to memory" in words


def test_the_banner_leaves_out_ops_that_the_model_does_not_run(run, tmp_path: Path) -> None:
    for name, *options in (("a",), ("b", "model.dropout=0.1", "model.position=rope", "optimizer=sgd")):
        assert run(name, "trainer.max_steps=2", *options)[0] == 0
    a, b = (" ".join((tmp_path / name / "train.log").read_text().split("ops ")[1].split()) for name in "ab")
    a, b = (words.split(" optimizer ")[0] for words in (a, b))
    assert ("rope" in a, "dropout" in a, "adamw" in a) == (False, False, True)
    assert ("rope" in b, "dropout" in b, "adamw" in b) == (True, True, False)


@pytest.fixture
def without_compiler(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PATH": str(tmp_path / "nothing"), "XDG_CACHE_HOME": str(tmp_path / "home"), "CXX": ""}


def test_a_machine_without_a_compiler_trains_and_says_why(tiny, tmp_path: Path, without_compiler) -> None:
    command = [sys.executable, str(TRAIN), *tiny, f"run.dir={tmp_path / 'a'}", "trainer.max_steps=2"]
    result = subprocess.run(command, env=without_compiler, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    words = " ".join(result.stdout.split())  # the banner wraps
    assert "adamw reference (no C++ compiler" in words


@pytest.mark.parametrize("layout", ["single", "tp2"])
def test_kernels_asked_for_where_there_are_none_are_refused(tiny, tmp_path: Path, without_compiler, layout) -> None:
    before = snapshot(tmp_path)
    options = [f"run.dir={tmp_path / 'a'}", "ops=fused", f"parallelism={layout}"]
    command = [sys.executable, str(TRAIN), *tiny, *options]
    result = subprocess.run(command, env=without_compiler, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ops=fused: no C++ compiler")
    assert result.stderr.count("\n") == 1
    assert snapshot(tmp_path) == before
