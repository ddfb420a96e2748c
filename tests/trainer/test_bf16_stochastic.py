"""Runs whose parameters are bf16: read by the tools, and to and from runs with fp32 masters."""

import pytest
import torch
from run_files import checkpoint

from gptlite.trainer.restore import restore

HALF = ("precision=bf16_stochastic", "optimizer.lr=3e-3", "model.dropout=0.1")


def test_the_checkpoint_is_bf16_widened(run, tmp_path):
    run("whole", *HALF, "trainer.max_steps=3")
    stored = checkpoint(tmp_path / "whole", 3)[0]
    weights = {key: value for key, value in stored.items() if key.startswith("model.")}
    assert all(torch.equal(value, value.bfloat16().float()) for value in weights.values())
    model, runner, *_ = restore(str(tmp_path / "whole"), "fp32")
    for name, parameter in model.named_weights(runner.parts[0]):
        assert torch.equal(parameter, weights[f"model.{name}"])


@pytest.mark.slow
def test_to_and_from_masters(run, tmp_path):
    run("a", "trainer.max_steps=2", "precision=bf16")
    before = checkpoint(tmp_path / "a", 2)[0]
    run("a", "trainer.max_steps=3", *HALF, "optimizer.lr=1e-30")
    after = checkpoint(tmp_path / "a", 3)[0]
    for key in before:
        if key.startswith("model."):  # rounded to nearest, and then next to nothing is added
            assert torch.equal(after[key], before[key].bfloat16().float())
    run("a", "trainer.max_steps=4", "precision=bf16")
    log = (tmp_path / "a" / "train.log").read_text()
    assert "weights are rounded to bf16 (precision.master_weights=false)" in log
    assert "bf16_stochastic (asked for" in log
