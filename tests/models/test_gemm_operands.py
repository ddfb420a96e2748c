"""How a GPU is given the matrices of a training step: a step on the meta device, with every product's operands seen."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatched import Watching
from models.conftest import planned, policy
from torch import Tensor

from gptlite.kernels.library import LoadedLibrary, load
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.ops.config import PRODUCTS, Attention, CrossEntropy, Products
from gptlite.ops.cross_entropy import VocabShard, linear_cross_entropy
from gptlite.ops.select import Ops
from gptlite.precision import Precision

MULTIPLE = 8  # elements of 16 bits: 16 bytes
VOCAB, WIDTH, TOKENS = 50257, 64, 2 * 128
# Names of products, and where their matrices are among the arguments.
MATRICES = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_addmm_activation": (1, 2)}
SCALED = ("_scaled_mm", "_scaled_mm_v2")
OTHERS = ("linear", "matmul", "mv", "addmv", "dot", "einsum")  # should have been taken apart before they come here


class Operands(Watching):
    """Notes each product with the matrices it is given and the one it makes."""

    def __init__(self) -> None:
        super().__init__(self.note)
        self.seen: list[tuple[str, list[Tensor]]] = []

    def note(self, func: Any, args: Any, out: Any) -> None:
        name = func._opname
        assert name not in OTHERS, f"{name} is a product of an unknown kind"
        if name in MATRICES or name in SCALED:
            matrices = [args[at] for at in MATRICES.get(name, (0, 1))]
            self.seen.append((str(func), [*matrices, out]))


def faults(matrix: Tensor) -> list[str]:
    """What of a matrix (or a batch of them) keeps a GPU from copying it 16 bytes at a time."""
    multiple = MULTIPLE * 2 // matrix.element_size()
    *batch, rows, columns = matrix.stride()
    found = []
    if 1 not in (rows, columns):
        found.append("no stride of 1")
    leading = [stride for stride in (*batch, rows, columns) if stride != 1]
    if any(stride % multiple for stride in leading):
        found.append(f"a stride that is no multiple of {multiple}")
    if any(size % multiple for size in matrix.shape[-2:]):
        found.append(f"a side that is no multiple of {multiple}")
    if matrix.storage_offset() % multiple:
        found.append(f"an offset of {matrix.storage_offset()}")
    return found


def misaligned(products: list[tuple[str, list[Tensor]]]) -> list[str]:
    """A line for each operand that is."""
    return [
        f"{name} {' '.join(str(list(m.shape)) for m in matrices)}: operand {index} with strides {matrix.stride()}"
        f" has {', '.join(faults(matrix))}"
        for name, matrices in products
        for index, matrix in enumerate(matrices)
        if faults(matrix)
    ]


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **_: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def traced(monkeypatch: pytest.MonkeyPatch, precision: Precision, **model: Any) -> list[tuple[str, list[Tensor]]]:
    """The products of two micro-batches of a training step, and one of evaluation."""
    assert isinstance(load("cpu"), LoadedLibrary)
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    shape = {"num_layers": 2, "num_heads": 4, "d_model": WIDTH, "vocab_size": VOCAB, "sequence_length": 128}
    ops = Ops(Attention.sdpa, CrossEntropy.fused, layer_norm=True, activation=True, dropout=True, linear=True)
    with torch.device("meta"):
        whole = GPT(GPTConfig(**shape | model), ops)
        tokens = torch.zeros(2, TOKENS // 2, dtype=torch.int64)
    part = planned(whole, policy(precision))
    with Operands() as operands:
        for known in (None, 0.5):
            # Whatever is known of the factor: to look at it would be to wait for the device, and is an error here.
            (part(tokens, tokens, upstream=known) / torch.empty((), device="meta")).backward()
        with torch.no_grad():
            part(tokens, tokens)
    for name, parameter in part.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape
    return operands.seen


@pytest.mark.parametrize("model", [{}, {"vocab_multiple": 1}, {"tied_embeddings": False, "bias": False}], ids=str)
@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp8, Precision.fp32], ids=lambda each: each.value)
def test_every_operand_is_aligned(monkeypatch: pytest.MonkeyPatch, precision: Precision, model: dict[str, Any]) -> None:
    seen = traced(monkeypatch, precision, **model)
    layers = 4 * 2  # four linear layers, two blocks
    assert len(seen) == 2 * 3 * (layers + 1) + layers + 1
    assert not misaligned(seen), "\n".join(misaligned(seen))


@pytest.mark.parametrize("rank", [0, 4])
def test_shares_of_the_table_are_aligned(rank: int) -> None:
    """Of five ranks, which hold 10,061 rows each but for the last."""
    assert isinstance(load("cpu"), LoadedLibrary)
    longest = -(-50304 // 5)
    rows = min(longest, 50304 - rank * longest)
    hidden, weight = (torch.empty(each, WIDTH, device="meta", requires_grad=True) for each in (TOKENS, rows))
    targets = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    shard = VocabShard(rank * longest, longest, lambda stats: torch.stack([stats] * 5))
    with Operands() as operands:
        hidden_16 = hidden.to(torch.bfloat16)
        linear_cross_entropy(hidden_16, weight, targets, VOCAB, shard, CrossEntropy.fused).backward()
    assert len(operands.seen) == 3
    assert not misaligned(operands.seen)
    assert weight.grad is not None
    assert weight.grad.shape == (rows, WIDTH)


def test_a_sliced_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding undone: each of the head's three products has an operand that a GPU copies in small pieces."""
    monkeypatch.setitem(PRODUCTS, "meta", Products(fp32=True))
    lines = misaligned(traced(monkeypatch, Precision.bf16))
    assert len({line.partition(":")[0] for line in lines}) == 3
    assert all(f"{VOCAB}" in line for line in lines)
    assert any(f"aten.mm.default [{TOKENS}, {VOCAB}] [{VOCAB}, {WIDTH}]" in line for line in lines)


def test_misaligned_operands_are_named() -> None:
    matrix = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    assert not faults(matrix(16, 64))
    assert not faults(matrix(3, 16, 64).mT)
    assert faults(matrix(16, 57)) == ["a stride that is no multiple of 8", "a side that is no multiple of 8"]
    assert faults(matrix(16, 64)[:, :57]) == ["a side that is no multiple of 8"]
    assert faults(matrix(16, 64, 8)[:, :, 0]) == ["no stride of 1"]
    assert faults(matrix(16, 64)[:, 4:12]) == ["an offset of 4"]
