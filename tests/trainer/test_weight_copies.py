"""16-bit copies of weights, forced on a CPU: the same bits as casting in each forward pass."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Watching
from marking import marked
from torch import Tensor, nn

from gptlite.config import Config, load
from gptlite.models.parallelize import copy_weights
from gptlite.ops.weight_copies import as_dtype, copy_of, keep_copies
from gptlite.optimizer.fused import writes_copies
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import resolve_precision
from gptlite.satellites.parity.record import build
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step

CPU = torch.device("cpu")
CASES = {
    "fp16": ["precision=fp16", "precision.initial_scale_power=24", "precision.hysteresis=1"],
    "muon": ["precision=bf16", "optimizer=muon"],
    "untied": ["precision=bf16", "model.tied_embeddings=false", "model.dropout=0.1"],
    "recomputed": ["precision=bf16", "parallelism.activation_checkpointing=full"],
    "reference": ["precision=bf16", "ops=reference", "ops.adamw=fused"],
    "linear": ["precision=bf16", "ops.linear=reference"],
    "lion": ["precision=bf16", "optimizer=lion"],
    "bf16": ["precision=bf16"],
    "amp_o1": ["precision=amp_o1"],
    "amp_o2": ["precision=amp_o2"],
}


@pytest.fixture
def start(tiny: list[str], tmp_path: Path) -> Callable[..., tuple[TrainState, Step, Config]]:
    def begin(copies: bool, *more: str) -> tuple[TrainState, Step, Config]:
        config = load([*tiny, "model.num_layers=2", *more, f"run.dir={tmp_path}", "run.name=x"])
        state, step = build(config, Mesh(CPU))
        if copies:
            copy_weights(state.parts, Mesh(CPU), resolve_precision(config.precision, CPU))
        return state, step, config

    return begin


def with_copies(state: TrainState) -> dict[str, nn.Parameter]:
    return {name: p for name, p in state.named_parameters() if hasattr(p, "weight_copy")}


def assert_same(one: TrainState, other: TrainState) -> None:
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []


@pytest.mark.parametrize("case", marked(list(CASES), quick=4, slow=len(CASES) - 4))
def test_eight_steps_are_the_same_to_the_bit(start: Callable, case: str) -> None:
    (plain, plain_step, _), (copied, copied_step, _) = (start(copies, *CASES[case]) for copies in (False, True))
    gradients: dict[int, list[Tensor]] = {}

    def inspect(state: TrainState) -> None:
        gradients[id(state)] = [p.grad.clone() for p in state.weights() if p.grad is not None]

    assert with_copies(copied)
    with closing(plain.loader), closing(copied.loader):
        for number in range(8):
            one, other = plain_step(plain, inspect), copied_step(copied, inspect)
            assert repr(one) == repr(other)
            pairs = zip(gradients[id(plain)], gradients[id(copied)], strict=True)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
            if number == 3:  # a checkpoint is loaded
                stored = {key: tensor.clone() for key, tensor in plain.tensors().items()}
                targets = copied.tensors()
                with torch.no_grad():
                    for key, tensor in targets.items():
                        tensor.copy_(stored[key])
                copied.take(targets)
    assert_same(plain, copied)


def test_the_kernel_leaves_no_copy_stale(start: Callable) -> None:
    state, step, _ = start(True, "precision=bf16")
    with closing(state.loader):
        assert all(copy_of(p) is None for p in with_copies(state).values())  # until a forward pass
        for _ in range(2):
            step(state)
            for p in with_copies(state).values():
                copy = copy_of(p)
                assert copy is not None
                assert torch.equal(copy, p.detach().to(torch.bfloat16))


def test_a_step_casts_no_weight(start: Callable) -> None:
    found: list[list[int]] = [[], []]

    def see(func: Any, args: Any, out: Any) -> None:
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, out.dtype) == (torch.float32, torch.bfloat16):
            found[copies].append(out.numel())

    for copies in (False, True):
        state, step, _ = start(copies, "precision=bf16")
        with closing(state.loader):
            step(state)
            with Watching(see):
                step(state)
    weights = sum(p.numel() for p in with_copies(state).values())
    looked_up = 2 * 32 * 32  # rows of the embedding, 2 sequences of 32 tokens of width 32: read from the copy too
    assert sum(found[0]) - sum(found[1]) == 2 * (weights + looked_up)  # in each of two micro-batches
    assert len(with_copies(state)) == len(list(state.named_parameters())) - 1  # all but learned positions


@pytest.mark.parametrize(
    "name", ["head.weight", "layers.0.mlp.up.weight", "layers.1.attn_norm.bias", "layers.0.attn.qkv.bias"]
)
def test_a_weight_that_is_written_by_hand_counts(start: Callable, name: str) -> None:
    tokens, losses = torch.arange(64).view(2, 32), []
    for copies in (False, True):
        state, step, _ = start(copies, "precision=bf16")
        (part,) = state.parts
        with closing(state.loader):
            step(state)
            with torch.no_grad():
                part.get_parameter(name)[:2].mul_(3.0)
                losses.append(part(tokens, tokens))
                part.get_parameter(name).detach()[0] += 0.25
                losses.append(part(tokens, tokens))
            step(state)
            losses.append(part(tokens, tokens).detach())
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))
    assert len({float(loss) for loss in losses[:3]}) == 3


def test_a_stale_copy_is_not_used_where_no_pass_began() -> None:
    layer = nn.Linear(4, 4)
    keep_copies(layer, {layer.weight: torch.bfloat16})
    layer(torch.ones(4))
    copy = copy_of(layer.weight)
    assert copy is not None
    assert as_dtype(layer.weight, torch.bfloat16).data_ptr() == copy.data_ptr()
    assert as_dtype(layer.weight, torch.float16).dtype == torch.float16
    with torch.no_grad():
        layer.weight.fill_(7.0)
    assert (as_dtype(layer.weight, torch.bfloat16) == 7.0).all()
    as_dtype(layer.weight, torch.bfloat16).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_a_skipped_step_leaves_a_stale_copy_stale(start: Callable) -> None:
    """Written between the backward pass and a step that the device leaves out."""
    state, step, _ = start(True, "precision=bf16")
    with closing(state.loader):
        step(state)
        name, weight = next(iter(with_copies(state).items()))
        with torch.no_grad():
            weight.add_(1.0)
        for p in state.weights():
            p.grad = torch.ones_like(p)
        state.optimizer.step(found_inf=torch.tensor(1.0))
        assert copy_of(weight) is None, name
        state.optimizer.step()
        assert copy_of(weight) is None, name


@pytest.mark.parametrize(("options", "writes"), [
    ("optimizer=adamw", True), ("optimizer=adam", True), ("optimizer=sgd", False), ("ops.adamw=reference", False),
    ("precision=bf16_stochastic", False), ("optimizer=muon", True),
])  # fmt: skip
def test_which_optimizers_write_them(start: Callable, options: str, writes: bool) -> None:
    state, _, _ = start(False, options)
    state.loader.close()
    assert writes_copies(state.optimizer) is writes
