"""What a GPU must do as the CPU does. Skipped without one; docs/benchmarks.md says when they last ran."""

import copy
from pathlib import Path

import pytest
import torch
from run_files import read_metrics

from gptlite.model.config import GPTConfig
from gptlite.model.gpt import GPT
from gptlite.model.init import draw_normal_, init_weights
from gptlite.ops.config import Attention
from gptlite.ops.select import Ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def test_initial_weights_are_the_cpus() -> None:
    drawn = [torch.empty(3_000_001, device=device) for device in ("cpu", "cuda")]
    for tensor in drawn:
        draw_normal_(tensor, 0.02, 7, "layers.0.mlp.up.weight")
    torch.testing.assert_close(drawn[1].cpu(), drawn[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("attention", [Attention.sdpa, Attention.matmul])
def test_loss_and_gradients_are_the_cpus(attention: Attention) -> None:
    config = GPTConfig(vocab_size=501, d_model=128, dropout=0.1)
    cpu = GPT(config, Ops(Attention.matmul), seed=3)
    init_weights(cpu, config, seed=3)
    gpu = copy.deepcopy(cpu).cuda()
    for block in gpu.layers.values():
        block.attn.implementation = attention
    tokens, ids = torch.randint(501, (4, 257)), torch.arange(4)
    losses = [
        model(tokens[:, :-1].to(device), tokens[:, 1:].to(device), ids.to(device))
        for model, device in ((cpu, "cpu"), (gpu, "cuda"))
    ]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    for (name, a), b in zip(cpu.named_parameters(), gpu.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad.cpu()).norm() <= 1e-4 * a.grad.norm() + 1e-6, name


@pytest.mark.parametrize(
    "overrides", [["precision=fp32"], ["precision=bf16"], ["precision=bf16", "trainer.compile=true"]]
)
def test_a_run_trains_and_resumes(run, tmp_path: Path, overrides: list[str]) -> None:
    assert run("a", *overrides, "trainer.max_steps=4")[0] == 0
    assert run("a", *overrides, "trainer.max_steps=60")[0] == 0
    rows = [row for row in read_metrics(tmp_path / "a") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < 0.75 * rows[0]["loss"]
