"""Attention windows: what a layer sees. Caches are in test_generate.py, documents in test_documents.py."""

import pytest
import torch
from models.conftest import CHOICES, MODERN
from models.test_documents import batch

from gptlite.config import load
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import flops_per_token
from gptlite.ops.config import Attention

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("model", [{}, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.value)
def test_a_position_depends_on_its_window_alone(tiny, choice, model):
    model = tiny(choice, dropout=0.0, num_layers=2, windows=[3, 5], **model).eval()
    tokens, seen = torch.randint(53, (1, 16), generator=torch.Generator().manual_seed(0)), 3 + 5 - 1
    before = model.hidden(tokens, None)
    for changed in range(16):
        other = tokens.clone()
        other[0, changed] = (tokens[0, changed] + 1) % 53
        differs = (model.hidden(other, None) - before).abs().amax(-1)[0] > 1e-6
        expected = [changed <= position < changed + seen for position in range(16)]
        assert differs.tolist() == expected


def test_windows_repeat_and_wide_ones_are_none(tiny):
    config = load(["model.num_layers=5", "model.windows=[2,0]"]).model
    assert [config.window(layer) for layer in range(5)] == [2, 0, 2, 0, 2]
    tokens, targets, _ = batch()
    losses = [tiny(Attention.matmul, dropout=0.0, windows=windows)(tokens, targets) for windows in ([], [16], [100, 0])]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.value)
def test_compiled_blocks_have_each_their_window(tiny, choice):
    tokens, targets, _ = batch()
    plain, compiled = (tiny(choice, dropout=0.0, num_layers=4, windows=[3, 0, 5, 100]) for _ in range(2))
    torch.compiler.reset()  # at most 8 graphs of a function
    for block in compiled.blocks():
        block.compile(backend="aot_eager", fullgraph=True)
    for model in (plain, compiled):
        model(tokens, targets).backward()
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_flops_count_the_keys_in_a_window():
    whole, half = (GPTConfig(vocab_size=64, sequence_length=8, windows=windows) for windows in ([], [4, 0]))
    layers, width = whole.num_layers // 2, whole.query_size
    # Of 8 causal queries, 8·8/2 keys; with a window of 4 they lack 4·4/2.
    assert flops_per_token(whole, 8) - flops_per_token(half, 8) == layers * 12 * width * (4 * 4 / 2) / 8
