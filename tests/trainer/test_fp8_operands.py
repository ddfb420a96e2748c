"""Weights quantized once per step: the same bits as in each forward pass."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from marking import marked

from gptlite.config import load
from gptlite.ops import fp8
from gptlite.ops.fp8 import kept
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.parity.record import build
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step

CPU = torch.device("cpu")
ONCE = ["data.micro_batch_size=4", "data.global_batch_size=4"]
TWICE = ["data.micro_batch_size=2", "data.global_batch_size=4"]
BOTH = ["precision=fp8", "precision.fp8_head=true"]
CASES = {
    "adamw": [*BOTH, *TWICE],
    "muon": [*BOTH, *TWICE, "optimizer=muon"],
    "head alone, untied": ["precision=bf16", "precision.fp8_head=true", *TWICE, "model.tied_embeddings=false"],
    "recomputed": [*BOTH, *TWICE, "parallelism.activation_checkpointing=full"],
    "recomputed once": [*BOTH, *ONCE, "parallelism.activation_checkpointing=selective"],
    "adam": [*BOTH, *TWICE, "optimizer=adam"],
    "reference": [*BOTH, *TWICE, "ops=reference", "ops.adamw=fused"],
    "experts": ["precision=fp8", *TWICE, "model.moe.experts=4", "model.moe.top_k=2"],
}


@pytest.fixture
def start(tiny: list[str], tmp_path: Path) -> Callable[..., tuple[TrainState, Step]]:
    def begin(*more: str) -> tuple[TrainState, Step]:
        config = load([*tiny, "model.num_layers=2", *more, f"run.dir={tmp_path}", "run.name=x"])
        return build(config, Mesh(CPU))

    return begin


def places(state: TrainState) -> dict[str, fp8.KeptOperands]:
    return {name: p.fp8_operands for name, p in state.named_parameters() if hasattr(p, "fp8_operands")}


@pytest.mark.parametrize("case", marked(list(CASES), quick=3, slow=len(CASES) - 3))
def test_six_steps_are_the_same_to_the_bit(start, monkeypatch, case):
    copied, copied_step = start(*CASES[case])
    monkeypatch.setattr(fp8, "keep_operands", lambda parts: None)
    plain, plain_step = start(*CASES[case])
    assert places(copied)
    assert not places(plain)
    with closing(plain.loader), closing(copied.loader):
        for number in range(6):
            assert repr(plain_step(plain)) == repr(copied_step(copied))
            if number == 3:  # a checkpoint is loaded
                stored = {key: tensor.clone() for key, tensor in plain.tensors().items()}
                targets = copied.tensors()
                with torch.no_grad():
                    for key, tensor in targets.items():
                        tensor.copy_(stored[key])
                copied.take(targets)
    mine, theirs = plain.tensors(), copied.tensors()
    assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []


def test_each_weight_is_quantized_once_per_step(start, monkeypatch):
    """Of two micro-batches with recomputation, four forward passes of each weight of a block."""
    state, step = start(*CASES["recomputed"], "model.tied_embeddings=false")
    shapes, both = [], fp8.both_layouts
    weights = {tuple(p.shape) for name, p in state.named_parameters() if name in places(state)}

    def noticed(x, dtype, *fused):
        shapes.append((dtype, tuple(x.shape)))
        return both(x, dtype, *fused)

    monkeypatch.setattr(fp8, "both_layouts", noticed)
    with closing(state.loader):
        for _ in range(2):
            shapes.clear()
            step(state)
            quantized = [shape for dtype, shape in shapes if dtype == fp8.INPUT and shape in weights]
            assert len(quantized) == len(places(state))


@pytest.mark.parametrize(
    "without",
    [ONCE, [*TWICE, "optimizer=adamw", "ops.adamw=reference"], [*TWICE, "trainer.compile=true"]],
    ids=["one micro-batch", "torch's fused kernel, which raises no version", "compiled"],
)
def test_where_there_is_no_use_or_no_version_nothing_is_kept(start, without):
    state, _ = start(*BOTH, *without)
    assert not places(state)
    state.loader.close()


def test_any_write_makes_the_operands_stale():
    weight = torch.nn.Parameter(torch.ones(16, 16))
    weight.fp8_operands = fp8.KeptOperands()
    first = kept(weight, weight.bfloat16)
    assert kept(weight, lambda: pytest.fail("quantized again"))[0] is first[0]
    with torch.no_grad():
        weight.mul_(3)
    assert kept(weight, weight.bfloat16)[2].item() == pytest.approx(3 * first[2].item())
