"""Attention over sequences that are cut is attention over whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.cells.run import Ranks
from gptlite.models.gpt.attention import CausalSelfAttention
from gptlite.models.gpt.config import GPTConfig
from gptlite.ops.config import Attention
from gptlite.ops.dropout import DropoutKey
from gptlite.ops.select import Ops, load
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.context import ContextAxis, context_axis
from gptlite.parallelism.mesh import build_mesh

BATCH, LENGTH, HEADS, WIDTH = 2, 48, 3, 24


def attention(choice: Attention, dropout: float) -> CausalSelfAttention:
    """Attention with weights that are the same on every rank."""
    torch.manual_seed(0)
    config = GPTConfig(num_heads=HEADS, d_model=WIDTH, dropout=dropout)
    return CausalSelfAttention(config, Ops(choice, dropout=choice is Attention.fused))


def errors(choice: Attention, dropout: float, refill: bool) -> dict[str, float]:
    """On every rank: how far the output and the gradients of its chunks are from those of whole sequences in fp64, over
    the largest value there. The gradient of the weights is of the sum over the ranks."""
    load("cpu")
    mesh = build_mesh(ParallelismConfig(context=torch.distributed.get_world_size()))
    try:
        axis = context_axis(mesh, refill)
        assert axis is not None
        key = DropoutKey(7, 1, torch.tensor([3, 11])) if dropout else None
        x = torch.randn(BATCH, LENGTH, WIDTH)
        grad = torch.randn(BATCH, LENGTH, WIDTH)
        torch.distributed.broadcast(x, 0)
        torch.distributed.broadcast(grad, 0)
        whole = attention(Attention.matmul, dropout).double()
        expected = _run(whole, x.double(), grad.double(), key)
        chunk = LENGTH // (2 * axis.size)
        mine = torch.cat([start + torch.arange(chunk) for start in axis.starts(2 * chunk)])
        cut = attention(choice, dropout)
        cut.context = axis
        found = _run(cut, x[:, mine], grad[:, mine], key)
        for name in sorted(found.keys() - {"out", "x"}):
            torch.distributed.all_reduce(found[name])
        for name in ("out", "x"):
            expected[name] = expected[name][:, mine]
        return {name: _apart(found[name], expected[name]) for name in expected}
    finally:
        mesh.close()


def _run(module: CausalSelfAttention, x: Tensor, grad: Tensor, key: DropoutKey | None) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out, _ = module(x, None if key is None else replace(key))
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}  # type: ignore[dict-item]


def _apart(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def kept_bytes(refill: bool) -> tuple[int, int, int]:
    """Bytes of gathered keys and values before attention, between its forward and backward pass, and in the latter."""
    mesh = build_mesh(ParallelismConfig(context=torch.distributed.get_world_size()))
    try:
        axis = context_axis(mesh, refill)
        assert axis is not None
        seen: list[Any] = []

        class Watched(ContextAxis):
            def gather_keys_and_values(self, qkv: Tensor) -> Any:
                pairs, memory = super().gather_keys_and_values(qkv)
                storage = pairs[0][0].untyped_storage()
                seen.append(storage)
                sizes.append(storage.nbytes())
                pairs[0][0].register_hook(lambda _: sizes.append(storage.nbytes()))
                return pairs, memory

        sizes: list[int] = []
        module = attention(Attention.matmul, 0.0)
        module.context = Watched(axis.group, axis.size, axis.rank, refill)
        out, _ = module(torch.randn(BATCH, LENGTH // axis.size, WIDTH))
        sizes.append(seen[0].nbytes())
        out.sum().backward()
        before, between, during = sizes
        return before, between, during
    finally:
        mesh.close()


CASES = "distributed.test_context:"


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, collective_timeout=200) as started:
        yield started


PATHS = [
    (Attention.matmul, 0.0),
    (Attention.matmul, 0.3),
    (Attention.sdpa, 0.0),
    (Attention.fused, 0.0),
    (Attention.fused, 0.3),
    (Attention.fused_softmax, 0.0),
]


@pytest.mark.parametrize("refill", [True, False], ids=["gathered_again", "kept"])
@pytest.mark.parametrize(("choice", "dropout"), PATHS, ids=str)
def test_outputs_and_gradients_are_those_of_whole_sequences(
    ranks: Ranks, choice: Attention, dropout: float, refill: bool
):
    for errors in ranks.run(CASES + "errors", choice, dropout, refill, timeout=200):
        assert errors.keys() == {"out", "x", "qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
        assert max(errors.values()) < 1e-6, errors


def test_gathered_keys_and_values_take_no_memory_between_forward_and_backward(ranks: Ranks):
    whole = 2 * BATCH * LENGTH * WIDTH * 4
    assert set(ranks.run(CASES + "kept_bytes", True, timeout=200)) == {(whole, 0, whole)}
    assert set(ranks.run(CASES + "kept_bytes", False, timeout=200)) == {(whole, whole, whole)}
