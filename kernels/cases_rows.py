"""Cases of the ops whose rows are independent: softmax, norms, GELU, dropout."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gptlite.kernels.case import Case, Inputs, Tensors, ops, pair, size_of, times

SCALE, EPS, P, SEED = 0.3, 1e-5, 0.2, 1234
# On a CPU so small that the runs take seconds; a GPU's are GPT-3 Small's and XL's, and larger than its cache.
SQUARE = ((256, 256), (1024, 1024)), ((1024, 1024), (2048, 2048))
WIDE = ((1024, 768), (2048, 2048)), ((8192, 768), (8192, 2048))
HIDDEN = ((1024, 768), (2048, 2048)), ((8192, 3072), (8192, 8192))


def _softmax_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    x = torch.randn(2, 4, rows, width, dtype=dtype, device=device)
    mask = torch.rand(2, 1, rows, width, device=device) < 0.3
    mask[0, 0, 0] = True  # a row with all left out
    return {"x": x, "mask": mask, "dy": torch.randn_like(x)}


def _masked_softmax(inputs: Inputs) -> Tensors:
    return (ops().masked_softmax(inputs["x"], inputs["mask"], SCALE),)


def _masked_softmax_backward(inputs: Inputs, results: Tensors) -> Tensors:
    return (ops().masked_softmax_backward(inputs["dy"], results[0], SCALE),)


def _masked_softmax_traffic(inputs: Inputs) -> tuple[float, ...]:
    forward, backward = times(2, 3)(inputs)
    return forward + size_of(inputs["mask"]), backward


def _torch_masked_softmax(inputs: Inputs) -> Tensors:
    scores = (inputs["x"] * SCALE).masked_fill(inputs["mask"], torch.finfo(inputs["x"].dtype).min)
    return (torch.softmax(scores, dim=-1) * ~inputs["mask"],)


def _causal_softmax(inputs: Inputs) -> Tensors:
    return (ops().causal_softmax(inputs["x"], SCALE),)


def _causal_softmax_backward(inputs: Inputs, results: Tensors) -> Tensors:
    return (ops().causal_softmax_backward(inputs["dy"], results[0], SCALE),)


def _torch_causal_softmax(inputs: Inputs) -> Tensors:
    x = inputs["x"]
    mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1 + x.shape[-1] - x.shape[-2])
    return _torch_masked_softmax(inputs | {"mask": mask})


def _norm_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    x = torch.randn(3, rows, width, dtype=dtype, device=device)
    vectors = torch.randn(3, width, dtype=dtype, device=device)
    others = {"residual": torch.randn_like(x), "dy": torch.randn_like(x)}
    weight, beta, bias = vectors.unbind()
    key = {"site": torch.tensor(7, device=device), "ids": torch.tensor([5, 2**33 + 1, 0], device=device)}
    return {"x": x, "weight": weight.clone(), "beta": beta.clone(), "bias": bias.clone(), **others, **key}


def _layer_norm(inputs: Inputs) -> Tensors:
    return ops().layer_norm(inputs["x"], inputs["weight"], inputs["beta"], EPS)


def _layer_norm_backward(inputs: Inputs, results: Tensors) -> Tensors:
    return ops().layer_norm_backward(inputs["dy"], inputs["x"], inputs["weight"], *results[1:], True)


def _torch_layer_norm(inputs: Inputs) -> Tensors:
    return (functional.layer_norm(inputs["x"], inputs["weight"].shape, inputs["weight"], inputs["beta"], EPS),)


def _residual_norm(inputs: Inputs) -> Tensors:
    tensors = (inputs[name] for name in ("x", "bias", "residual", "weight", "beta"))
    return ops().residual_norm(*tensors, EPS, *_dropout_key(inputs))


def _residual_norm_backward(inputs: Inputs, results: Tensors) -> Tensors:
    options = True, True, *_dropout_key(inputs)
    return ops().residual_norm_backward(inputs["dy"], None, results[1], inputs["weight"], *results[2:], *options)


def _dropout_key(inputs: Inputs) -> tuple[Any, ...]:
    return P, SEED, inputs["site"], inputs["ids"], 3


def _torch_residual_norm(inputs: Inputs) -> Tensors:
    x = inputs["x"] + inputs["bias"]
    h = inputs["residual"] + x * _keep(x, inputs) / (1 - P)
    return *_torch_layer_norm(inputs | {"x": h}), h


def _plain_residual_norm(inputs: Inputs) -> Tensors:
    h = inputs["residual"] + functional.dropout(inputs["x"] + inputs["bias"], P)
    return *_torch_layer_norm(inputs | {"x": h}), h


def _dropout(inputs: Inputs) -> Tensors:
    return (ops().dropout(inputs["x"], *_dropout_key(inputs), 0),)


def _torch_dropout(inputs: Inputs) -> Tensors:
    return (inputs["x"] * _keep(inputs["x"], inputs) / (1 - P),)


def _plain_dropout(inputs: Inputs) -> Tensors:
    return (functional.dropout(inputs["x"], P),)


def _keep(x: Tensor, inputs: Inputs) -> Tensor:
    """The mask of [B, S, C] as the header defines it: Philox4x32-10."""
    lane = torch.arange(-(-x.shape[-1] // 4), device=x.device)
    position = torch.arange(3, 3 + x.shape[1], device=x.device).view(-1, 1)
    ids = inputs["ids"].view(-1, 1, 1)
    word = 0xFFFFFFFF
    c = list(torch.broadcast_tensors(lane, position, ids & word, ids >> 32 << 16))
    k0, k1 = SEED, inputs["site"]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32 & word) ^ c[1] ^ k0, second & word, (first >> 32 & word) ^ c[3] ^ k1, first & word]
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return torch.stack(c, dim=-1).flatten(-2)[..., : x.shape[-1]] >= int(P * 2**32)


def _bias_gelu(inputs: Inputs, tanh: bool) -> Tensors:
    return (ops().bias_gelu(inputs["x"], inputs["bias"], tanh),)


def _bias_gelu_backward(inputs: Inputs, results: Tensors, tanh: bool) -> Tensors:
    return ops().bias_gelu_backward(inputs["dy"], inputs["x"], inputs["bias"], tanh)


def _torch_bias_gelu(inputs: Inputs, tanh: bool) -> Tensors:
    return (functional.gelu(inputs["x"] + inputs["bias"], approximate="tanh" if tanh else "none"),)


ROWS = (
    Case(
        pair("masked_softmax"),
        *(_softmax_inputs, _masked_softmax, _masked_softmax_backward, _torch_masked_softmax, ("x",), *SQUARE),
        traffic=_masked_softmax_traffic,
    ),
    Case(
        pair("causal_softmax"),
        *(_softmax_inputs, _causal_softmax, _causal_softmax_backward, _torch_causal_softmax, ("x",), *SQUARE),
        traffic=times(1.5, 2),
    ),
    Case(
        pair("layer_norm"),
        *(_norm_inputs, _layer_norm, _layer_norm_backward, _torch_layer_norm, ("x", "weight", "beta"), *WIDE),
        traffic=times(2, 3),
    ),
    Case(
        pair("residual_norm"),
        *(_norm_inputs, _residual_norm, _residual_norm_backward, _torch_residual_norm),
        *(("x", "residual", "bias", "weight", "beta"), *WIDE),
        traffic=times(4, 4),
        plain=_plain_residual_norm,
        compared=2,
    ),
    *(
        Case(
            (f"bias_gelu{name}", f"bias_gelu_backward{name}"),
            *(_norm_inputs, partial(_bias_gelu, tanh=tanh), partial(_bias_gelu_backward, tanh=tanh)),
            *(partial(_torch_bias_gelu, tanh=tanh), ("x", "bias"), *HIDDEN),
            traffic=times(2, 3),
        )
        for name, tanh in (("", True), (" erf", False))
    ),
    Case(
        ("dropout",),
        *(_norm_inputs, _dropout, None, _torch_dropout, (), *WIDE),
        traffic=times(2),
        plain=_plain_dropout,
    ),
)
