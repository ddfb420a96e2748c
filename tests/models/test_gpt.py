"""The whole model against GPT-2 written out a second time, below, from the paper: logits, loss, every gradient."""

import math

import pytest
import torch
import torch.nn.functional as F

from gptlite.models.gpt.attention import CausalSelfAttention
from gptlite.models.gpt.config import MLPKind
from gptlite.models.gpt.model import GPT
from gptlite.ops import attention as attention_op
from gptlite.ops.config import Attention, CrossEntropy
from gptlite.ops.dropout import DropoutKey, keep_mask
from gptlite.ops.inputs import IGNORE
from gptlite.ops.select import Ops

TOLERANCE = 1e-5  # fp32 against fp64: largest error over the tensor's largest value

ACTIVATIONS = {
    MLPKind.gelu_tanh: lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    MLPKind.gelu_erf: lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    MLPKind.relu: lambda x: x.clamp(min=0),
}


class Dropout:
    """Dropout of one run and batch, by the number of its site."""

    def __init__(self, p, seed, sample_ids):
        self.p, self.seed, self.sample_ids = p, seed, sample_ids

    def __call__(self, x, site):
        return x * keep_mask(x.shape, self.p, DropoutKey(self.seed, site, self.sample_ids)) / (1 - self.p)


def gpt2(w, config, tokens, dropout=lambda x, site: x):
    """Logits [B, S, V]. `w`: weights by our names, the QKV projections ungrouped: all of q, then k, then v."""

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return scaled * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)

    def attention(x, name, site):
        heads = [t.unflatten(-1, (config.num_heads, -1)).transpose(1, 2) for t in linear(x, f"{name}.qkv").chunk(3, -1)]
        q, k, v = heads
        v = mixed(v, f"{name}.values")
        scores = q @ k.mT / math.sqrt(config.d_model // config.num_heads)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        p = dropout(scores.masked_fill(future, -math.inf).softmax(-1), site)
        return linear((p @ v).transpose(1, 2).flatten(-2), f"{name}.proj")

    def mixed(v, name):
        """The sum, with weights, of a layer's values and the first layer's."""
        parts = [v, *unmixed[: config.value_residual]]
        unmixed.append(v)
        return sum(scale * part for scale, part in zip(w.get(f"{name}.weight", [1]), parts, strict=True))

    act, unmixed = ACTIVATIONS[config.mlp], []
    x = w["token_embedding.weight"][tokens] + w["position_embedding.weight"][: tokens.shape[1]]
    x = dropout(x, 0)
    for i in range(config.num_layers):
        block, site = f"layers.{i}", 3 * i + 1
        x = x + dropout(attention(norm(x, f"{block}.attn_norm"), f"{block}.attn", site), site + 1)
        hidden = act(linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up"))
        x = x + dropout(linear(hidden, f"{block}.mlp.down"), site + 2)
    head = w.get("head.weight", w["token_embedding.weight"])
    return norm(x, "final_norm") @ head[: config.vocab_size].T


def ungroup(tensor, heads):
    """QKV rows by (head, q|k|v, channel) -> by (q|k|v, head, channel)."""
    return tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def reference_weights(model):
    """fp64 leaves for `gpt2`."""
    return {
        name: (ungroup(p, model.config.num_heads) if ".qkv." in name else p).detach().double().requires_grad_()
        for name, p in model.named_parameters()
    }


def assert_close(name, got, want, tolerance=TOLERANCE):
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < tolerance, f"{name}: {error:.1e}"


def check(model: GPT, batch, dropout=lambda x, site: x, tolerance=TOLERANCE):
    """Loss and every gradient."""
    tokens, targets, sample_ids = batch
    config = model.config
    loss = model(tokens, targets, sample_ids)
    loss.backward()
    w = reference_weights(model)
    logits, counted = gpt2(w, config, tokens, dropout).flatten(0, 1), targets.flatten() != IGNORE
    want = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    want = want + config.z_loss * (logits.exp().sum(-1).log() ** 2)[counted].sum()
    want.backward()
    assert loss.dtype == torch.float32
    assert_close("loss", loss, want)
    for name, parameter in model.named_parameters():
        got = ungroup(parameter.grad, config.num_heads) if ".qkv." in name else parameter.grad
        assert_close(name, got, w[name].grad, tolerance)


@pytest.mark.parametrize("activation", list(ACTIVATIONS), ids=lambda activation: activation.value)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_loss_and_every_gradient(tiny, batch, tied, bias, activation):
    model = tiny(tied_embeddings=tied, bias=bias, mlp=activation)
    assert ("head.weight" in dict(model.named_parameters())) is not tied
    assert any(name.endswith("bias") for name, _ in model.named_parameters()) is bias
    check(model, batch)


@pytest.mark.parametrize("choice", CrossEntropy, ids=lambda choice: choice.value)
@pytest.mark.usefixtures("kernels")
def test_z_loss_is_of_the_loss_in_training_and_not_in_evaluation(tiny, batch, choice):
    tokens, targets, _ = batch
    model, plain = (tiny(ops=Ops(cross_entropy=choice), z_loss=z_loss) for z_loss in (0.1, 0.0))
    check(model, batch)
    assert torch.equal(model.eval()(tokens, targets), plain(tokens, targets))
    assert model.train()(tokens, targets) > 1.1 * plain(tokens, targets)


@pytest.mark.parametrize("choice", [Attention.matmul, Attention.sdpa], ids=lambda choice: choice.value)
def test_either_attention_and_several_blocks_of_queries(tiny, batch, monkeypatch, choice):
    monkeypatch.setattr(attention_op, "QUERY_BLOCK", 5)
    check(tiny(choice), batch)


def test_dropout_is_at_its_sites(tiny, batch):
    """Embedding, attention probabilities and both residual branches, each with a mask of its own number."""
    model = tiny(dropout=0.3)
    check(model, batch, Dropout(0.3, model.seed, batch[2]))


def test_dropout_is_off_in_evaluation_and_without_sample_numbers(tiny, batch):
    tokens, targets, sample_ids = batch
    model, plain = tiny(dropout=0.3), tiny()
    want = plain(tokens, targets)
    assert torch.equal(model(tokens, targets), want)
    assert not torch.equal(model(tokens, targets, sample_ids), want)
    assert torch.equal(model.eval()(tokens, targets, sample_ids), want)


def test_a_sample_has_the_same_loss_in_any_batch_with_dropout(tiny, batch):
    model = tiny(dropout=0.3)
    whole = model(*batch)
    parts = [model(*(t[rows] for t in batch)) for rows in ([2], [3, 0], [1])]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=0)


def test_logits_of_every_position(tiny, batch):
    tokens, model = batch[0], tiny()
    with torch.no_grad():
        want = gpt2(reference_weights(model), model.config, tokens)
        for length in (1, 5, tokens.shape[1]):
            logits = model(tokens[:, :length], None)
            assert logits.shape == (4, model.config.vocab_size)
            assert_close(f"position {length}", logits, want[:, length - 1])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_padding_rows_get_no_gradient(tiny, batch, tied):
    model = tiny(tied_embeddings=tied)
    tokens, targets, _ = batch
    before = model(tokens, targets)
    before.backward()
    size = model.config.vocab_size
    assert len(model.head.weight) == 64 > size
    assert torch.count_nonzero(model.head.weight.grad[size:]) == 0
    with torch.no_grad():
        model.head.weight[size:] = 1e3
        assert torch.equal(model(tokens, targets), before)


def test_the_qkv_projection_is_grouped_by_head(tiny, batch):
    """Zeroing the rows of one head's v silences that head's part of the output projection's input, no other."""
    model = tiny()
    attention = model.layers["0"].attn
    assert isinstance(attention, CausalSelfAttention)
    width, seen = attention.head_width, []
    attention.proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    with torch.no_grad():
        attention.qkv.weight[(3 * 1 + 2) * width : (3 * 1 + 3) * width] = 0
        attention.qkv.bias[(3 * 1 + 2) * width : (3 * 1 + 3) * width] = 0
        model(batch[0], None)
    heads = seen[0].unflatten(-1, (3, width)).abs().amax((0, 1, 3))
    assert heads[1] == 0
    assert heads[0] > 0
    assert heads[2] > 0


def test_parameters_have_their_documented_names(tiny):
    """What checkpoints, the initialisation and the optimizer's groups know parameters by."""
    block = [
        f"{part}.{kind}"
        for part in ("attn_norm", "attn.qkv", "attn.proj", "mlp_norm", "mlp.up", "mlp.down")
        for kind in ("weight", "bias")
    ]
    names = ["token_embedding.weight", "position_embedding.weight"]
    names += [f"layers.{i}.{name}" for i in range(2) for name in block]
    names += ["final_norm.weight", "final_norm.bias"]
    assert [name for name, _ in tiny().named_parameters()] == names
    assert [name for name, _ in tiny(tied_embeddings=False).named_parameters()] == [*names, "head.weight"]


def test_longer_than_the_learned_positions_is_refused(tiny):
    tokens = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"the sequence has 17 tokens, but model\.sequence_length=16"):
        tiny()(tokens, tokens)


def test_a_vocabulary_must_be_known(tiny):
    with pytest.raises(ValueError, match=r"model\.vocab_size is null"):
        tiny(vocab_size=None)
