"""What one device does as a CPU does: initial weights, and a run from its start to a resumed end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_files import differing, read_metrics, without_plots

from gptlite.models.init import draw_normal_
from gptlite.start.pretrain import ALLOCATOR_VARIABLES
from gpu.device import DEVICE, ON_A_CPU_SLOW

# In a process of its own, before its first allocation.
SEGMENTS = """
import torch
from gptlite.start.pretrain import grow_segments
grow_segments()
tensors = [torch.empty(size << 20, device="cuda") for size in (1, 30, 200)]
print([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()])
"""


def test_initial_weights_are_the_cpus() -> None:
    drawn = [torch.empty(3_000_001, device=device) for device in ("cpu", DEVICE)]
    for tensor in drawn:
        draw_normal_(tensor, 0.02, 7, "layers.0.mlp.up.weight")
    torch.testing.assert_close(drawn[1].cpu(), drawn[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("overrides", [["optimizer=adamw"], ["optimizer=muon"], ["precision=fp16", "optimizer=adamw"]])
def test_a_run_from_a_graph_is_the_run_without(run, tmp_path: Path, overrides: list[str]) -> None:
    if DEVICE.type == "cpu":
        pytest.skip("a CPU has no CUDA graph; tests/graph replays tapes")
    for name in ("auto", "false"):
        assert run(name, *overrides, f"trainer.cuda_graph={name}", "trainer.max_steps=20")[0] == 0
    assert "steps: one CUDA graph" in (tmp_path / "auto" / "train.log").read_text()
    losses = [[row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("auto", "false")]
    assert losses[0] == losses[1]
    assert differing(tmp_path / "auto", tmp_path / "false", 20) == []


FP32 = pytest.param(["precision=fp32"], marks=ON_A_CPU_SLOW)
BF16 = pytest.param(["precision=bf16"], marks=ON_A_CPU_SLOW)
COMPILED = pytest.param(["precision=bf16", "trainer.compile=true"], marks=ON_A_CPU_SLOW)


@pytest.mark.parametrize("overrides", [FP32, BF16, COMPILED], ids=" ".join)
def test_a_run_trains_and_resumes(run, tmp_path: Path, overrides: list[str]) -> None:
    with without_plots():
        assert run("a", *overrides, "trainer.max_steps=4")[0] == 0
        assert run("a", *overrides, "trainer.max_steps=60")[0] == 0
    rows = [row for row in read_metrics(tmp_path / "a") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < 0.75 * rows[0]["loss"]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="for GPUs")
def test_segments_of_gpu_memory_grow() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    program = [sys.executable, "-c", SEGMENTS]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "True" in done.stdout
    assert "False" not in done.stdout
