"""Documents that share a sequence are computed as if each were alone: hidden states, losses, gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gptlite.data.loader import document_starts
from gptlite.kernels.library import Loaded, load
from gptlite.ops.config import Attention
from gptlite.ops.cross_entropy import IGNORE

END = 52
CHOICES = [Attention.matmul, Attention.sdpa, Attention.fused_softmax, Attention.fused]
# Lengths of the documents of each row, the end among them; the last document of a row is cut, or ends with it.
ROWS = [[5, 1, 7, 3], [1, 1, 14], [16], [4, 12], [15, 1], [2] * 8]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets and documents [B, 16]; rows of odd numbers end within a document."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, END, (len(ROWS), 17), generator=generator)
    for number, lengths in enumerate(ROWS):
        ends = torch.tensor(lengths).cumsum(0) - 1
        text[number, ends[:-1] if number % 2 else ends] = END
    tokens, targets = text[:, :-1], text[:, 1:].clone()
    targets[tokens == END] = IGNORE
    return tokens, targets, torch.from_numpy(document_starts(tokens.numpy(), END))


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


@pytest.fixture(scope="module", autouse=True)
def kernels():
    library = load("cpu")
    assert isinstance(library, Loaded), library


def test_documents_begin_after_an_end():
    tokens = np.array([[1, 9, 2, 3, 9, 9, 4], [9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 9], [9, 1, 1, 1, 1, 1, 1]])
    assert document_starts(tokens, 9).tolist() == [
        [0, 0, 2, 2, 2, 5, 6],
        [0, 1, 2, 3, 4, 5, 6],
        [0] * 7,
        [0, 1, 1, 1, 1, 1, 1],
    ]
    tokens, _, documents = batch()
    assert [(row, documents[row, where].unique().tolist()) for row, where in pieces(tokens)] == [
        (row, [where.start]) for row, where in pieces(tokens)
    ]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.value)
def test_together_is_apart(tiny, choice):
    together, apart = tiny(choice, dropout=0.0), tiny(Attention.matmul, dropout=0.0)
    tokens, targets, documents = batch()
    hidden, losses = together.hidden(tokens, None, documents=documents), []
    total = together(tokens, targets, documents=documents)
    total.backward()
    for row, where in pieces(tokens):
        alone = apart.hidden(tokens[row : row + 1, where], None)
        torch.testing.assert_close(hidden[row : row + 1, where], alone, rtol=1e-5, atol=2e-6)
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
    for (name, ours), theirs in zip(together.named_parameters(), apart.parameters(), strict=True):
        worst = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1e-3)
        assert worst < 1e-5, (name, worst)


def test_it_makes_a_difference(tiny):
    """Or the test above would show nothing."""
    model = tiny(dropout=0.0)
    tokens, targets, documents = batch()
    plain, apart = model(tokens, targets), model(tokens, targets, documents=documents)
    assert (plain - apart).abs() > 1e-3 * apart
    positions = model._embed(tokens, None, 0, documents) - model._embed(tokens, None, 0, None)
    assert torch.equal(positions.abs().sum(-1) > 0, documents > 0)


def test_one_document_is_a_plain_sequence(tiny):
    model = tiny(dropout=0.1)
    tokens, targets, _ = batch()
    tokens = tokens.masked_fill(tokens == END, 3)
    ids, none = torch.arange(len(tokens)), torch.zeros_like(tokens)
    model.train()
    torch.testing.assert_close(
        model(tokens, targets, ids, documents=none), model(tokens, targets, ids), rtol=1e-6, atol=0
    )
