"""A run by our kernels, by the references, and on a machine that cannot compile."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import forked
import pytest
import torch
from run_files import snapshot

from gptlite.config import load
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.parity.record import build

# The first 20 of 100 warm-up steps to 1e-3: Adam makes a whole step of rounding noise where a gradient is tiny.
TWENTY = ("run.dir=unused", "run.name=x", "trainer.max_steps=50", "optimizer.lr=5e-4", "schedule.warmup_steps=49")


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
def test_twenty_steps_are_the_same_to_rounding(tiny: list[str], fused, reference) -> None:
    curves = []
    for overrides in (fused, reference):
        state, step = build(load([*tiny, *TWENTY, *overrides]), Mesh(torch.device("cpu")))
        with closing(state.loader):
            results = [step(state) for _ in range(20)]
        curves.append([(result.loss, result.grad_norm) for result in results])
    for ours, theirs in zip(*curves, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_banner_names_the_kernel_that_sdpa_takes(banner: Callable[..., str]) -> None:
    words = banner("a", "ops.attention=sdpa", "model.dropout=0.1", "precision=fp32")
    assert "SDPA uses flash for float32 heads of" in words
    assert "; dropout writes the scores to memory" in words


def test_the_banner_leaves_out_ops_that_the_model_does_not_run(banner: Callable[..., str]) -> None:
    a, b = banner("a"), banner("b", "model.dropout=0.1", "model.position=rope", "optimizer=sgd")
    a, b = (words.split(" ops ")[1].split(" optimizer ")[0] for words in (a, b))
    assert ("rope" in a, "dropout" in a, "adamw" in a) == (False, False, True)
    assert ("rope" in b, "dropout" in b, "adamw" in b) == (True, True, False)


@pytest.fixture
def without_compiler(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PATH": str(tmp_path / "nothing"), "XDG_CACHE_HOME": str(tmp_path / "home"), "CXX": ""}


def test_a_machine_without_a_compiler_trains_and_says_why(tiny, tmp_path: Path, without_compiler) -> None:
    options = [*tiny, f"run.dir={tmp_path / 'a'}", "trainer.max_steps=2"]
    ended = forked.run("-m", "gptlite", "train", *options, folder=tmp_path, environment=without_compiler)
    assert ended.returncode == 0
    words = " ".join(ended.stdout.split())  # the banner wraps
    assert "adamw reference (no C++ compiler" in words


@pytest.mark.parametrize("layout", ["single", "tp2"])
def test_kernels_asked_for_where_there_are_none_are_refused(tiny, tmp_path: Path, without_compiler, layout) -> None:
    before = snapshot(tmp_path)
    options = [*tiny, f"run.dir={tmp_path / 'a'}", "ops=fused", f"parallelism={layout}"]
    ended = forked.run("-m", "gptlite", "train", *options, folder=tmp_path, environment=without_compiler)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ops=fused: no C++ compiler")
    assert ended.stderr.count("\n") == 1
    assert snapshot(tmp_path) == before
