"""Value residuals and value embeddings: a formula by hand, caches, documents, parameters, stages."""

import pytest
import torch
import torch.nn.functional as F
from models.test_documents import MODERN, batch, pieces
from torch import Tensor

from gptlite.models.gpt.cache import LayerCache
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import num_parameters
from gptlite.models.gpt.model import GPT
from gptlite.models.gpt.spec import GPTSpec
from gptlite.models.gpt.values import parted, with_values
from gptlite.ops.config import Attention
from gptlite.plan.parameters import num_parameters as planned_parameters

pytestmark = pytest.mark.usefixtures("kernels")
BOTH = {"value_residual": True, "value_embeddings": 2}
CHOICES = [Attention.matmul, Attention.sdpa, Attention.fused]


def by_hand(model: GPT, tokens: Tensor) -> Tensor:
    """The last hidden states [B, S, d] of a GPT-2 with mixed values, written out from its state."""
    state, config, length = dict(model.named_parameters()), model.config, tokens.shape[1]
    heads, width = config.num_heads, config.head_width

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].t() + state[f"{name}.bias"]

    x = state["token_embedding.weight"][tokens] + state["position_embedding.weight"][:length]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    first = None
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        q, k, v = linear(norm(x, f"{name}.attn_norm"), f"{name}.attn.qkv").unflatten(-1, (heads, 3, width)).unbind(3)
        raw, parts = v, [v]
        if config.value_residual and first is not None:
            parts.append(first)
        if f"{name}.attn.values.embedding.weight" in state:
            parts.append(state[f"{name}.attn.values.embedding.weight"][tokens].unflatten(-1, (heads, width)))
        if len(parts) > 1:
            v = sum(scale * part for scale, part in zip(state[f"{name}.attn.values.weight"], parts, strict=True))
        first = raw if first is None else first
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
        out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        x = x + linear(out.flatten(2), f"{name}.attn.proj")
        x = x + linear(
            F.gelu(linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.up"), approximate="tanh"), f"{name}.mlp.down"
        )
    return norm(x, "final_norm")


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.value)
@pytest.mark.parametrize(
    "keys",
    [{"value_residual": True}, {"value_embeddings": 1}, {"value_embeddings": 3}, BOTH],
    ids=["residual", "every", "third", "both"],
)
def test_values_and_gradients_are_those_of_the_formula(tiny, choice, keys):
    model = tiny(choice, num_layers=4, dropout=0.0, **keys)
    tokens = torch.randint(53, (3, 11), generator=torch.Generator().manual_seed(2))
    names, parameters = zip(*model.named_parameters(), strict=True)
    outs = [model.hidden(tokens, None), by_hand(model, tokens)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(3))
    ours, expected = (torch.autograd.grad(out, parameters, upstream) for out in outs)
    for name, mine, theirs in zip(names, ours, expected, strict=True):
        assert (mine - theirs).abs().max() <= 2e-5 * max(theirs.abs().max().item(), 1e-2), name


def test_which_layers_mix():
    config = GPTConfig(num_layers=7, vocab_size=64, value_residual=True, value_embeddings=2)
    assert [layer for layer in range(7) if config.has_value_embedding(layer)] == [0, 2, 4, 6]
    assert [config.has_value_residual(layer) for layer in range(7)] == [False, *[True] * 6]
    assert config.mixed_layers == 7
    shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters() if ".values." in name}
    assert {name: shape for name, shape in shapes.items() if name.endswith("values.weight")} == {
        f"layers.{layer}.attn.values.weight": (2 if layer in (0, 1, 3, 5) else 3,) for layer in range(7)
    }
    assert shapes["layers.2.attn.values.embedding.weight"] == (128, 256)


@pytest.mark.parametrize("keys", [{"value_residual": True}, {"value_embeddings": 2}, {**BOTH, "kv_heads": 2}])
def test_parameters_are_counted(keys):
    config = GPTConfig(num_layers=5, vocab_size=64, **keys)
    count = sum(p.numel() for p in GPT(config).parameters())
    assert num_parameters(config) == planned_parameters(config) == count


@pytest.mark.parametrize("model", [{}, MODERN], ids=["gpt2", "modern"])
def test_caches_give_the_whole_sequence(tiny, model):
    model = tiny(Attention.matmul, num_layers=3, dropout=0.0, **BOTH, **model).eval()
    tokens = batch()[0][:2]
    with torch.no_grad():
        caches = [LayerCache(16) for _ in model.layers]
        model.logits(tokens[:, :5], caches)
        for place in range(5, 16):
            logits = model.logits(tokens[:, place : place + 1], caches)
        torch.testing.assert_close(logits, model.logits(tokens), rtol=1e-5, atol=1e-5)


def test_documents_are_as_if_alone(tiny):
    model = tiny(Attention.matmul, num_layers=3, dropout=0.0, **BOTH, **MODERN)
    tokens, _, documents = batch()
    together = model.hidden(tokens, None, documents=documents)
    for row, place in pieces(tokens):
        alone = model.hidden(tokens[row : row + 1, place], None)
        torch.testing.assert_close(together[row : row + 1, place], alone, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_stage_receives_what_was_sent(slices):
    x, v = torch.randn(3, 8 // slices, 10), torch.randn(3, 8, 2, 1, 4)  # 2 of 4 heads, of width 4
    sent = with_values(x, v, 16)
    assert sent.shape == (3, 8 // slices, 10 + 16)
    received = parted(sent, 16, 2, 4, slices)
    assert torch.equal(received[0], x)
    assert torch.equal(received[1], v)


def test_ranks_cannot_share_heads_of_mixed_values():
    plain, mixed = (GPTConfig(num_heads=8, kv_heads=2, value_residual=residual) for residual in (False, True))
    assert GPTSpec().tensor_sizes(plain)["model.num_heads"] == 8
    assert GPTSpec().tensor_sizes(mixed)["model.kv_heads"] == 2
