"""Test cases of every op, for `gptlite kernels test` and `bench`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlite.kernels.activation import ACTIVATIONS, is_gated
from gptlite.kernels.case import Case, Inputs, Tensors, size_of, times_first
from gptlite.kernels.cases_blocks import QUANTIZATION
from gptlite.kernels.cases_lists import UPDATES
from gptlite.kernels.cases_loss import LOSSES

OPS = torch.ops.gptlite
SCALE, EPS, P, SEED = 0.3, 1e-5, 0.2, 1234
# CPU sizes keep a run to seconds. GPU sizes are those of GPT-3 Small and XL, and exceed the cache.
SQUARE = ((256, 256), (1024, 1024)), ((1024, 1024), (2048, 2048))
WIDE = ((1024, 768), (2048, 2048)), ((8192, 768), (8192, 2048))
HIDDEN = ((1024, 768), (2048, 2048)), ((8192, 3072), (8192, 8192))
HEADS = ((256, 64), (1024, 64)), ()
PACKED_HEADS = ((256, 64), (1024, 64)), ((8192, 64), (8192, 128))
MOST_ROPE = 512  # columns of the widest head that the CUDA kernel takes


def _pair(name: str) -> tuple[str, str]:
    return name, f"{name}_backward"


# Softmax.


def _softmax_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    x = torch.randn(2, 4, rows, width, dtype=dtype, device=device)
    mask = torch.rand(2, 1, rows, width, device=device) < 0.3
    mask[0, 0, 0] = True  # a fully masked row
    return {"x": x, "mask": mask, "dy": torch.randn_like(x)}


def _torch_masked_softmax(inputs: Inputs) -> Tensors:
    scores = (inputs["x"] * SCALE).masked_fill(inputs["mask"], torch.finfo(inputs["x"].dtype).min)
    return (torch.softmax(scores, dim=-1) * ~inputs["mask"],)


def _torch_causal_softmax(inputs: Inputs) -> Tensors:
    x = inputs["x"]
    mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1 + x.shape[-1] - x.shape[-2])
    return _torch_masked_softmax(inputs | {"mask": mask})


SOFTMAX = (
    Case(
        _pair("masked_softmax"),
        _softmax_inputs,
        lambda given: (OPS.masked_softmax(given["x"], given["mask"], SCALE),),
        lambda given, results: (OPS.masked_softmax_backward(given["dy"], results[0], SCALE),),
        _torch_masked_softmax,
        ("x",),
        *SQUARE,
        traffic=lambda given: (2 * size_of(given["x"]) + size_of(given["mask"]), 3 * size_of(given["x"])),
    ),
    Case(
        _pair("causal_softmax"),
        _softmax_inputs,
        lambda given: (OPS.causal_softmax(given["x"], SCALE),),
        lambda given, results: (OPS.causal_softmax_backward(given["dy"], results[0], SCALE),),
        _torch_causal_softmax,
        ("x",),
        *SQUARE,
        traffic=times_first(1.5, 2),
    ),
)


# Norms, activations and dropout.


def _row_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    x = torch.randn(3, rows, width, dtype=dtype, device=device)
    vectors = torch.randn(3, width, dtype=dtype, device=device)
    others = {"residual": torch.randn_like(x), "dy": torch.randn_like(x)}
    weight, beta, bias = vectors.unbind()
    # One id has more than 32 bits, so that its upper word is tested too.
    key = {"site": torch.tensor(7, device=device), "ids": torch.tensor([5, 2**33 + 1, 0], device=device)}
    return {"x": x, "weight": weight.clone(), "beta": beta.clone(), "bias": bias.clone(), **others, **key}


def _dropout_key(inputs: Inputs) -> tuple[Any, ...]:
    return P, SEED, inputs["site"], inputs["ids"], 3


def _layer_norm_backward(inputs: Inputs, results: Tensors) -> Tensors:
    return OPS.layer_norm_backward(inputs["dy"], inputs["x"], inputs["weight"], *results[1:], True)


def _torch_layer_norm(inputs: Inputs) -> Tensors:
    return (F.layer_norm(inputs["x"], inputs["weight"].shape, inputs["weight"], inputs["beta"], EPS),)


def _residual_norm(inputs: Inputs, amax: str = "") -> Tensors:
    tensors = (inputs[name] for name in ("x", "bias", "residual", "weight", "beta"))
    return getattr(OPS, f"residual_norm{amax}")(*tensors, EPS, *_dropout_key(inputs))[:4]


def _residual_norm_backward(inputs: Inputs, results: Tensors, amax: str = "") -> Tensors:
    op, options = getattr(OPS, f"residual_norm{amax}_backward"), (True, True, *_dropout_key(inputs))
    return op(inputs["dy"], None, results[1], inputs["weight"], *results[2:], *options)[:5]


def _torch_residual_norm(inputs: Inputs) -> Tensors:
    h = _residual_sum(inputs)
    return *_torch_layer_norm(inputs | {"x": h}), h


def _residual_sum(inputs: Inputs) -> Tensor:
    return inputs["residual"] + _torch_dropout(inputs | {"x": inputs["x"] + inputs["bias"]})[0]


def _plain_residual_norm(inputs: Inputs) -> Tensors:
    h = inputs["residual"] + F.dropout(inputs["x"] + inputs["bias"], P)
    return *_torch_layer_norm(inputs | {"x": h}), h


def _torch_dropout(inputs: Inputs) -> Tensors:
    """Apply dropout to x [B, S, C] with the Philox4x32-10 mask that gptlite_kernels.h defines."""
    x, ids = inputs["x"], inputs["ids"].view(-1, 1, 1)
    lane = torch.arange(-(-x.shape[-1] // 4), device=x.device)
    position = torch.arange(3, 3 + x.shape[1], device=x.device).view(-1, 1)
    word = 0xFFFFFFFF
    c = list(torch.broadcast_tensors(lane, position, ids & word, ids >> 32 << 16))
    k0, k1 = SEED, inputs["site"]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32 & word) ^ c[1] ^ k0, second & word, (first >> 32 & word) ^ c[3] ^ k1, first & word]
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    keep = torch.stack(c, dim=-1).flatten(-2)[..., : x.shape[-1]] >= int(P * 2**32)
    return (x * keep / (1 - P),)


def _gated(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x[..., ::2]) * x[..., 1::2]


def _bias_activation(name: str, formula: Callable[[Tensor], Tensor], amax: str = "") -> Case:
    """`amax`: "_amax" for the ops that also return the amax of their result."""
    kind = ACTIVATIONS[name]

    def make(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        units = width // 2 if is_gated(kind) else width
        inputs = _row_inputs(rows, 2 * units if is_gated(kind) else units, dtype, device)
        return {"x": inputs["x"], "bias": inputs["bias"], "dy": inputs["dy"][..., :units].contiguous()}

    def forward(given: Inputs) -> Tensors:
        results = getattr(OPS, f"bias_activation{amax}")(given["x"], given["bias"], kind)
        return results[:1] if amax else (results,)

    def backward(given: Inputs, _: Tensors) -> Tensors:
        return getattr(OPS, f"bias_activation{amax}_backward")(given["dy"], given["x"], given["bias"], kind)[:2]

    return Case(
        (f"bias_activation{amax} {name}", f"bias_activation{amax}_backward {name}"),
        make,
        forward,
        backward,
        lambda given: (formula(given["x"] + given["bias"]),),
        ("x", "bias"),
        *HIDDEN,
        traffic=times_first(1.5, 2.5) if is_gated(kind) else times_first(2, 3),
    )


# RoPE and QK norm; gradients of heads and of tokens.


def _rope_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    width = min(width - width % 2, MOST_ROPE)
    qkv = torch.randn(2, rows, 3, 4, width, dtype=dtype, device=device)
    angles = torch.randn(1, rows, 1, 1, width // 2, device=device)
    gains = {name: torch.randn(width, dtype=dtype, device=device) for name in ("q_gain", "k_gain")}
    return {"qkv": qkv, "cos": angles.cos(), "sin": angles.sin(), **gains, "dy": torch.randn_like(qkv)}


def _torch_rope(inputs: Inputs, norm: bool) -> Tensors:
    q, k, v = inputs["qkv"].split((2, 1, 1), -2)
    if norm:
        q, k = (F.rms_norm(x, x.shape[-1:], inputs[f"{name}_gain"], EPS) for name, x in (("q", q), ("k", k)))
    return (torch.cat([*(_rotated(x, inputs["cos"], inputs["sin"]) for x in (q, k)), v], -2),)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _rope(name: str, norm: bool) -> Case:
    leaves = ("qkv", "q_gain", "k_gain") if norm else ("qkv",)

    def others(inputs: Inputs) -> tuple[Any, ...]:
        gains = (inputs["q_gain"], inputs["k_gain"], EPS) if norm else (None, None, None)
        return inputs["cos"], inputs["sin"], *gains

    def backward(inputs: Inputs, _: Tensors) -> Tensors:
        return OPS.rope_backward(inputs["dy"], inputs["qkv"] if norm else None, *others(inputs))[: len(leaves)]

    return Case(
        (f"rope{name}", f"rope_backward{name}"),
        _rope_inputs,
        lambda given: (OPS.rope(given["qkv"], *others(given)),),
        backward,
        lambda given: _torch_rope(given, norm),
        leaves,
        *PACKED_HEADS,
        traffic=times_first(2, 3 if norm else 2),
    )


def _join_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    parts = torch.randn(3, 2, rows, 6, width, dtype=dtype, device=device)
    return dict(zip(("dq", "dk", "dv"), parts.unbind(), strict=True))


def _torch_joined(inputs: Inputs) -> Tensors:
    dqkv = torch.stack([inputs["dq"], inputs["dk"], inputs["dv"]], 3)
    return dqkv, dqkv.flatten(0, 1).flatten(1).sum(0, dtype=dqkv.dtype)


def _token_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    tokens = torch.randperm(2 * rows, device=device)[torch.arange(rows, device=device) // 2]  # each occurs twice
    ordered, order = tokens.sort(stable=True)
    dy, table = torch.randn(rows, width, dtype=dtype, device=device), torch.randn(2 * rows, width, device=device)
    return {"dy": dy, "tokens": tokens, "ordered": ordered, "order": order, "table": table}


def _add_token_rows(inputs: Inputs) -> Tensors:
    OPS.add_token_rows_(*(inputs[name] for name in ("table", "dy", "ordered", "order")))
    return (inputs["table"],)


def _torch_token_rows(inputs: Inputs) -> Tensors:
    table, dy = inputs["table"], inputs["dy"].to(inputs["table"].dtype)
    return (table + torch.ops.aten.embedding_dense_backward(dy, inputs["tokens"], len(table), -1, False),)


def _rms_norms(name: str, *gain: str) -> tuple[Case, Case]:
    """Return the cases of RMS norm, alone and after a residual sum. `gain` is ("weight",), or () without a weight."""

    def weight(given: Inputs) -> Tensor | None:
        return given["weight"] if gain else None

    def norm(given: Inputs, x: Tensor) -> Tensors:
        return F.rms_norm(x, x.shape[-1:], weight(given), EPS), x

    def residual_norm(given: Inputs) -> Tensors:
        tensors = given["x"], given["bias"], given["residual"], weight(given), None
        return OPS.residual_norm(*tensors, EPS, *_dropout_key(given), True)

    def residual_norm_backward(given: Inputs, results: Tensors) -> Tensors:
        tensors = given["dy"], None, results[1], weight(given), None, results[3]
        return OPS.residual_norm_backward(*tensors, True, False, *_dropout_key(given))[: 3 + len(gain)]

    alone = Case(
        (f"layer_norm{name}", f"layer_norm_backward{name}"),
        _row_inputs,
        lambda given: OPS.layer_norm(given["x"], weight(given), None, EPS, True),
        lambda given, results: OPS.layer_norm_backward(given["dy"], given["x"], weight(given), None, results[2], False)[
            : 1 + len(gain)
        ],
        lambda given: norm(given, given["x"])[:1],
        ("x", *gain),
        *WIDE,
        traffic=times_first(2, 3),
    )
    after = Case(
        (f"residual_norm{name}", f"residual_norm_backward{name}"),
        _row_inputs,
        residual_norm,
        residual_norm_backward,
        lambda given: norm(given, _residual_sum(given)),
        ("x", "residual", "bias", *gain),
        *WIDE,
        traffic=times_first(4, 4),
        plain=lambda given: norm(given, given["residual"] + F.dropout(given["x"] + given["bias"], P)),
        compared=2,
    )
    return alone, after


ROWS = (
    Case(
        _pair("layer_norm"),
        _row_inputs,
        lambda given: OPS.layer_norm(given["x"], given["weight"], given["beta"], EPS),
        _layer_norm_backward,
        _torch_layer_norm,
        ("x", "weight", "beta"),
        *WIDE,
        traffic=times_first(2, 3),
    ),
    Case(
        _pair("residual_norm"),
        _row_inputs,
        _residual_norm,
        _residual_norm_backward,
        _torch_residual_norm,
        ("x", "residual", "bias", "weight", "beta"),
        *WIDE,
        traffic=times_first(4, 4),
        plain=_plain_residual_norm,
        compared=2,
    ),
    Case(
        ("residual_norm_amax", "residual_norm_amax_backward"),
        _row_inputs,
        partial(_residual_norm, amax="_amax"),
        partial(_residual_norm_backward, amax="_amax"),
        _torch_residual_norm,
        ("x", "residual", "bias", "weight", "beta"),
        *WIDE,
        traffic=times_first(4, 4),
        plain=_plain_residual_norm,
        compared=2,
    ),
    *_rms_norms(" rms", "weight"),
    *_rms_norms(" rms without gain"),
    _bias_activation("gelu_tanh", partial(F.gelu, approximate="tanh")),
    _bias_activation("gelu_tanh", partial(F.gelu, approximate="tanh"), amax="_amax"),
    _bias_activation("gelu_erf", F.gelu),
    _bias_activation("relu", F.relu),
    _bias_activation("relu2", lambda x: F.relu(x).square()),
    _bias_activation("swiglu", _gated(F.silu)),
    _bias_activation("geglu", _gated(F.gelu)),
    _rope("", norm=False),
    _rope(" qk_norm", norm=True),
    Case(
        ("join_heads",),
        _join_inputs,
        lambda given: OPS.join_heads(*given.values(), True, given["dq"].dtype == torch.float32),
        None,
        _torch_joined,
        (),
        *PACKED_HEADS,
        traffic=times_first(6),
        compared=2,
    ),
    Case(
        ("add_token_rows_",),
        _token_inputs,
        _add_token_rows,
        None,
        _torch_token_rows,
        (),
        *WIDE,
        # Rows of dy are read. The table's rows of the tokens that occur, in fp32, are read and written.
        traffic=lambda given: (size_of(given["dy"]) + 2 * size_of(given["table"][: -(-len(given["dy"]) // 2)]),),
    ),
    Case(
        ("dropout",),
        _row_inputs,
        lambda given: (OPS.dropout(given["x"], *_dropout_key(given), 0),),
        None,
        _torch_dropout,
        (),
        *WIDE,
        traffic=times_first(2),
        plain=lambda given: (F.dropout(given["x"], P),),
    ),
)


# Attention. Traffic is relative to the first input, which holds queries, keys and values, a third each.


def _attention_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    qkv = torch.randn(2, rows, 4, 3, width, dtype=dtype, device=device)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
    return {"qkv": qkv, "q": q, "k": k, "v": v, "dy": torch.randn_like(q).transpose(1, 2).contiguous().transpose(1, 2)}


def _torch_attention(inputs: Inputs) -> Tensors:
    q, k, v = (inputs[name] for name in "qkv")
    return (F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE),)


def _attention_packed(inputs: Inputs) -> Tensors:
    out, lse = OPS.attention_packed(inputs["qkv"], SCALE)
    return out.transpose(1, 2), lse


def _attention_packed_backward(inputs: Inputs, results: Tensors) -> Tensors:
    dout, out = (each.transpose(1, 2) for each in (inputs["dy"], results[0]))
    return (OPS.attention_packed_backward(dout, out, results[1], inputs["qkv"], SCALE),)


def _torch_attention_packed(inputs: Inputs) -> Tensors:
    parts = dict(zip("qkv", (part.transpose(1, 2) for part in inputs["qkv"].unbind(3)), strict=True))
    return _torch_attention(inputs | parts)


ATTENTION = (
    Case(
        _pair("attention"),
        _attention_inputs,
        lambda given: OPS.attention(*(given[name] for name in "qkv"), SCALE),
        lambda given, results: OPS.attention_backward(given["dy"], *results, *(given[name] for name in "qkv"), SCALE),
        _torch_attention,
        ("q", "k", "v"),
        *HEADS,
        traffic=times_first(4 / 3, 8 / 3),
        cpu_only=True,
    ),
    Case(
        _pair("attention_packed"),
        _attention_inputs,
        _attention_packed,
        _attention_packed_backward,
        _torch_attention_packed,
        ("qkv",),
        *HEADS,
        traffic=times_first(4 / 3, 8 / 3),
        cpu_only=True,
    ),
)

CASES = (*SOFTMAX, *ROWS, *LOSSES, *UPDATES, *QUANTIZATION, *ATTENTION)
