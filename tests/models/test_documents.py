"""Documents that share a sequence are computed as if each were alone: hidden states, losses, gradients."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models.conftest import CHOICES, MODERN, TINY, VALUES, planned
from torch import nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from gptlite.data.loader import document_starts, documents_in
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.models.parallelize import set_dtypes
from gptlite.ops import attention
from gptlite.ops.attention import Spans
from gptlite.ops.config import Attention
from gptlite.ops.inputs import IGNORE, Documents, Inputs, joined
from gptlite.ops.select import Ops
from gptlite.parallelism.pipeline import _Plain
from gptlite.precision import Policy

pytestmark = pytest.mark.usefixtures("kernels")
END = 52
# Lengths of the documents of each row, the end among them; the last document of a row is cut, or ends with it.
ROWS = [[5, 1, 7, 3], [1, 1, 14], [16], [4, 12], [15, 1], [2] * 8]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Tokens, targets and documents [B, 16]; rows of odd numbers end within a document."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, END, (len(ROWS), 17), generator=generator)
    for number, lengths in enumerate(ROWS):
        ends = torch.tensor(lengths).cumsum(0) - 1
        text[number, ends[:-1] if number % 2 else ends] = END
    tokens, targets = text[:, :-1], text[:, 1:].clone()
    targets[tokens == END] = IGNORE
    return tokens, targets, documents_in(tokens.numpy(), END)


def pieces(tokens: torch.Tensor) -> list[tuple[int, slice]]:
    """Row and place of every document."""
    found = []
    for number, row in enumerate(tokens.tolist()):
        first = 0
        for place, token in enumerate(row):
            if token == END or place == len(row) - 1:
                found.append((number, slice(first, place + 1)))
                first = place + 1
    return found


def test_documents_begin_after_an_end():
    tokens = np.array([[1, 9, 2, 3, 9, 9, 4], [9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 9], [9, 1, 1, 1, 1, 1, 1]])
    assert document_starts(tokens, 9).tolist() == [
        [0, 0, 2, 2, 2, 5, 6],
        [0, 1, 2, 3, 4, 5, 6],
        [0] * 7,
        [0, 1, 1, 1, 1, 1, 1],
    ]
    tokens, _, documents = batch()
    assert [(row, documents.starts[row, where].unique().tolist()) for row, where in pieces(tokens)] == [
        (row, [where.start]) for row, where in pieces(tokens)
    ]


def check_gradients(one: GPT, other: GPT) -> None:
    for (name, ours), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        worst = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1e-3)
        assert worst < 1e-5, (name, worst)


MODELS = {"gpt2": {}, "modern": MODERN, "values": MODERN | VALUES | {"num_layers": 3}}
MODELS["windows"] = MODERN | {"windows": [3, 0]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.value)
def test_packed_documents_train_as_separate_ones(tiny, choice, name):
    together, apart = tiny(choice, **MODELS[name]), tiny(Attention.matmul, **MODELS[name])
    tokens, targets, documents = batch()
    hidden, losses = together.hidden(tokens, None, documents=documents), []
    total = together(tokens, targets, documents=documents)
    total.backward()
    for row, where in pieces(tokens):
        alone = apart.hidden(tokens[row : row + 1, where], None)
        torch.testing.assert_close(hidden[row : row + 1, where], alone, rtol=1e-5, atol=4e-6)
        logits, wanted = (alone @ apart.head.weight.t())[0, :, :53], targets[row, where]
        ours = (hidden[row, where] @ together.head.weight.t())[:, :53]
        each = F.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="none")
        torch.testing.assert_close(
            F.cross_entropy(ours, wanted, ignore_index=IGNORE, reduction="none"), each, rtol=1e-5, atol=1e-5
        )
        losses.append(apart(tokens[row : row + 1, where], targets[row : row + 1, where]))
    whole = torch.stack(losses).sum()
    whole.backward()
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)
    check_gradients(together, apart)


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
    """Stand-in for torch's varlen_attn, which runs on a GPU alone: one document after the other."""
    assert window_size == (-1, 0)
    assert cu_q is cu_k
    assert cu_q.dtype == torch.int32
    bounds = cu_q.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(q)
    assert 0 < max(end - start for start, end in pairwise(bounds)) <= max_q == max_k
    outs = [
        F.scaled_dot_product_attention(*(t[start:end].transpose(0, 1) for t in (q, k, v)), is_causal=True)
        for start, end in pairwise(bounds)
        if end > start
    ]
    return torch.cat(outs, 1).transpose(0, 1).contiguous()


@pytest.mark.parametrize("model", [{}, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_spans_are_the_mask(tiny, monkeypatch, dropout, model):
    """As on a GPU. With dropout attention writes its scores out, and takes the mask."""
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    spans, masked = (tiny(Attention.sdpa, dropout=dropout, **model) for _ in range(2))
    spans.varlen = True
    tokens, targets, documents = batch()
    assert isinstance(spans._documents_mask(documents, dropping=False), Spans)
    ids, totals = torch.arange(len(tokens)), []
    for model in (spans, masked):
        totals.append(model(tokens, targets, ids, documents=documents))
        totals[-1].backward()
    torch.testing.assert_close(*totals, rtol=1e-6, atol=0)
    check_gradients(spans, masked)


def test_spans_survive_recomputation(tiny, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    tokens, targets, documents = batch()
    losses = []
    for recomputed in (False, True):
        model = tiny(Attention.sdpa, dropout=0.0)
        model.varlen = True
        part = planned(model, Policy(torch.bfloat16, ""), "full") if recomputed else model
        part.compute_dtype = torch.float32
        losses.append(part(tokens, targets, documents=documents))
        losses[-1].backward()
    assert torch.equal(*losses)


def test_flash_attention_of_spans_takes_16_bits_and_widths_of_8(tiny):
    for dtype, kept in ((torch.float32, False), (torch.bfloat16, True), (torch.float16, True)):
        model = tiny(dropout=0.0)
        model.varlen = True
        set_dtypes(Model.of(model.config), model, Policy(dtype, ""))
        assert model.varlen is kept
    for width, kept in ((24, True), (36, False), (3 * 264, False)):
        config = GPTConfig(**TINY | {"d_model": width})
        assert GPT(config, Ops(Attention.sdpa, varlen=True)).varlen is kept


def test_spans_are_of_few_shapes():
    *_, documents = batch()
    assert documents.ends.dtype == torch.int32
    assert documents.ends.shape == (len(ROWS), 8)  # the row of most documents has 8
    assert documents.longest == 16
    assert documents.ends[1].tolist() == [17, 18, *[32] * 6]
    short = documents_in(np.array([[1, 9, 2, 3, 4, 9], [9, 1, 2, 9, 4, 4]]), 9)
    assert (short.ends.tolist(), short.longest) == ([[2, 6, 6, 6], [7, 10, 12, 12]], 4)
    wide = documents_in(np.full((1, 6), 9), 9)
    assert (wide.ends.tolist(), wide.longest) == ([[1, 2, 3, 4, 5, 6]], 1)
    both = joined([short, wide])
    assert both.ends.tolist() == [[2, 6, 6, 6, 6, 6], [7, 10, 12, 12, 12, 12], [1, 2, 3, 4, 5, 6]]
    assert both.longest == 4
    assert joined([short, Documents(wide.starts)]).ends is None


def test_a_pipelines_schedule_hands_each_micro_batch_its_documents():
    """It cuts tensors by rows, and copies all else."""
    seen: list[Documents] = []

    def forward(part: nn.Module, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        seen.append(inputs.documents)
        return x

    wanted = [documents_in(np.array([[1, 9, 2, 9, 9, 9]]), 9), documents_in(np.array([[1, 1, 1, 1, 1, 1]]), 9)]
    whole, plain = joined(wanted), _Plain(forward, nn.Identity(), 0, wanted[0].starts.shape)
    plain.longest = whole.longest
    given = {"targets": whole.starts, "sample_ids": whole.starts[:, 0], "starts": whole.starts, "ends": whole.ends}
    for args, kwargs in zip(*split_args_kwargs_into_chunks((whole.starts,), given, chunks=2), strict=True):
        plain(*args, **kwargs)
    for found, documents in zip(seen, wanted, strict=True):
        assert torch.equal(found.starts, documents.starts)
        assert found.ends.unique().tolist() == documents.ends.unique().tolist()
        assert found.longest == 6


def test_without_isolation_the_loss_differs(tiny):
    """Or the test above would show nothing."""
    model = tiny(dropout=0.0)
    tokens, targets, documents = batch()
    plain, apart = model(tokens, targets), model(tokens, targets, documents=documents)
    assert (plain - apart).abs() > 1e-3 * apart
    positions = model._embed(tokens, None, 0, documents) - model._embed(tokens, None, 0, None)
    assert torch.equal(positions.abs().sum(-1) > 0, documents.starts > 0)


def test_one_document_is_a_plain_sequence(tiny):
    model = tiny(dropout=0.1)
    tokens, targets, _ = batch()
    tokens = tokens.masked_fill(tokens == END, 3)
    ids, none = torch.arange(len(tokens)), Documents(torch.zeros_like(tokens))
    model.train()
    torch.testing.assert_close(
        model(tokens, targets, ids, documents=none), model(tokens, targets, ids), rtol=1e-6, atol=0
    )
