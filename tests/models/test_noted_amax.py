"""The amax that a kernel notes on what it writes: who reads it, and when it no longer holds. It changes no bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from models.conftest import TINY, build, differentiated, planned, policy
from torch import Tensor

from gptlite.models.gpt.config import MLPKind, Norm, Position
from gptlite.models.gpt.model import GPT
from gptlite.models.layers import Linear
from gptlite.ops.config import Attention
from gptlite.ops.fp8 import GRADIENT, INPUT, both_layouts, fp8_linear, quantized
from gptlite.ops.select import Ops
from gptlite.ops.weight_copies import amax_of, noted, noting

pytestmark = pytest.mark.usefixtures("kernels")
FUSED = Ops(Attention.matmul, layer_norm=True, activation=True, dropout=True, linear=True, deferred_add=True)
SIZES = {"num_heads": 2, "d_model": 32, "d_ff": 64}
LLAMA = {"norm": Norm.rms_norm, "position": Position.rope, "mlp": MLPKind.swiglu, "bias": False}


def test_a_note_holds_until_the_tensor_is_written_to() -> None:
    x = torch.full((2, 3), 2.0)
    assert amax_of(noted(x, torch.tensor(5.0))) == 5
    assert amax_of(x.view(6)) == 2  # another tensor
    x.view(6)[1] = 3
    assert amax_of(x) == 3
    assert amax_of(noted(x, None)) == 3


@pytest.mark.parametrize("dtype", [INPUT, GRADIENT], ids=str)
@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")], ids=str)
def test_the_kernel_quantizes_as_torch_does(dtype, value) -> None:
    x = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 2, 3] = value
    for function in (both_layouts, quantized):
        for found, wanted in zip(function(x, dtype, fused=True), function(x, dtype), strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found.float().nan_to_num(-1), wanted.float().nan_to_num(-1))


def test_a_linear_layer_takes_the_noted_amax() -> None:
    x, weight = torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
    right = fp8_linear(x, weight, fused=True)
    assert torch.equal(fp8_linear(noted(x, torch.tensor(0.5)), weight, fused=True), right / 2)  # 1 is cut off at 0.5


def built(**overrides: Any) -> GPT:
    """A model whose linear layers quantize by our kernel, which runs on every CPU; the bf16 head's kernel does not."""
    model = build(ops=FUSED, **SIZES | overrides)
    model.head.fused = False
    return model


def trained(batch: Any, noting: bool, recompute: str, **overrides: Any) -> tuple[list[Tensor], int]:
    """The loss and the gradients of a model in fp8, and how many tensors were read for their amax."""
    model = planned(built(**overrides), policy("fp8"), recompute)
    for module in model.modules():
        if hasattr(module, "notes_amax"):
            assert module.notes_amax
            module.notes_amax = noting
        elif isinstance(module, Linear):
            assert module.fused
            module.fused = noting
    with Dispatched() as dispatched:
        found = differentiated(model, batch)
    return found, dispatched.ops["linalg_vector_norm"]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("overrides", [{}, {"dropout": 0.2}, LLAMA], ids=["gpt", "dropout", "llama"])
def test_notes_spare_reads_and_change_no_bit(batch, overrides, recompute) -> None:
    """Of each layer, four weights, attention's output and the gradient of q, k and v are read for their amax; not what
    norms and the activation write, there and back. A recomputed block adds its MLP's output itself, whose gradient is
    read too."""
    found, reads = trained(batch, True, recompute, **overrides)
    wanted, before = trained(batch, False, recompute, **overrides)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert reads == (5 + 1 if recompute == "none" else 2 * 5 + 2) * TINY["num_layers"]
    assert before == (8 + 4 if recompute == "none" else 2 * 8 + 4) * TINY["num_layers"]


@pytest.mark.slow
def test_compiled_blocks_note_nothing(batch) -> None:
    """The kernel quantizes there too, with an amax that compiled code reads: at most twice as far from bf16 as eager
    code, since an activation that is rounded otherwise may become another value of fp8."""
    compiled, eager, bf16 = (
        differentiated(planned(model, policy(kind), compile=compile), batch)
        for model, kind, compile in (
            (built(), "fp8", True),
            (built(), "fp8", False),
            (build(ops=replace(FUSED, linear=False), **SIZES), "bf16", False),
        )
    )
    for ours, theirs, near in zip(compiled, eager, bf16, strict=True):
        assert (ours - near).norm() <= 2 * (theirs - near).norm()


def test_while_compiling_every_amax_is_read(monkeypatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not noting(True)
    assert amax_of(noted(torch.full((2, 3), 2.0), torch.tensor(5.0))) == 2
