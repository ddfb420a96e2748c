"""Every op with made-up arguments, and the same in torch's own ops: for `test` and `bench`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Inputs = dict[str, Any]  # tensors by name, lists of them, None
Results = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # of the forward op, of the backward op
SCALE, EPS, P, SEED, IGNORE, SMOOTHING, Z_LOSS = 0.3, 1e-5, 0.2, 1234, -100, 0.1, 1e-3
ADAM = (1e-3, 0.9, 0.95, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight_decay


@dataclass(frozen=True)
class Case:
    """One op or a pair of them.

    `ours` calls the kernels; `forward` is torch's and is differentiated with respect to `leaves`, the upstream gradient
    being the input named "dy". `passes`: how often the first input's bytes must travel, forward and backward.
    `plain`: what torch has for it where `forward` is only a definition.
    """

    ops: tuple[str, ...]
    make: Callable[[int, int, torch.dtype, torch.device], Inputs]
    ours: Callable[[Inputs], Results]
    forward: Callable[[Inputs], tuple[Tensor, ...]]
    leaves: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    passes: float
    plain: Callable[[Inputs], tuple[Tensor, ...]] | None = None
    cpu_only: bool = False

    def reference(self, inputs: Inputs) -> Results:
        """Torch's results and gradients, in the inputs' dtypes."""
        return differentiate(self.forward, inputs, self.leaves)


def differentiate(forward: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs, leaves: tuple[str, ...]) -> Results:
    """Results of a function of the inputs, and its gradients for "dy"."""
    if not leaves:
        return forward(inputs), ()
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in leaves}
    results = forward(inputs)
    gradients = torch.autograd.grad(results[0], [inputs[name] for name in leaves], inputs["dy"])
    return tuple(result.detach() for result in results), gradients


def _ops() -> Any:
    return torch.ops.gptlite


def _softmax_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    x = torch.randn(2, 4, rows, width, dtype=dtype, device=device)
    mask = torch.rand(2, 1, rows, width, device=device) < 0.3
    mask[0, 0, 0] = True  # a row with all left out
    return {"x": x, "mask": mask, "dy": torch.randn_like(x)}


def _masked_softmax(inputs: Inputs) -> Results:
    y = _ops().masked_softmax(inputs["x"], inputs["mask"], SCALE)
    return (y,), (_ops().masked_softmax_backward(inputs["dy"], y, SCALE),)


def _torch_masked_softmax(inputs: Inputs) -> tuple[Tensor, ...]:
    scores = (inputs["x"] * SCALE).masked_fill(inputs["mask"], torch.finfo(inputs["x"].dtype).min)
    return (torch.softmax(scores, dim=-1) * ~inputs["mask"],)


def _causal_softmax(inputs: Inputs) -> Results:
    y = _ops().causal_softmax(inputs["x"], SCALE)
    return (y,), (_ops().causal_softmax_backward(inputs["dy"], y, SCALE),)


def _torch_causal_softmax(inputs: Inputs) -> tuple[Tensor, ...]:
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


def _layer_norm(inputs: Inputs) -> Results:
    x, weight = inputs["x"], inputs["weight"]
    y, mean, rstd = _ops().layer_norm(x, weight, inputs["beta"], EPS)
    return (y,), _ops().layer_norm_backward(inputs["dy"], x, weight, mean, rstd, True)


def _torch_layer_norm(inputs: Inputs) -> tuple[Tensor, ...]:
    return (functional.layer_norm(inputs["x"], inputs["weight"].shape, inputs["weight"], inputs["beta"], EPS),)


def _residual_norm(inputs: Inputs) -> Results:
    weight, key = inputs["weight"], (P, SEED, inputs["site"], inputs["ids"], 3)
    y, h, mean, rstd = _ops().residual_norm(
        inputs["x"], inputs["bias"], inputs["residual"], weight, inputs["beta"], EPS, *key
    )
    return (y, h), _ops().residual_norm_backward(inputs["dy"], None, h, weight, mean, rstd, True, True, *key)


def _torch_residual_norm(inputs: Inputs) -> tuple[Tensor, ...]:
    x = inputs["x"] + inputs["bias"]
    h = inputs["residual"] + x * _keep(x, inputs) / (1 - P)
    return *_torch_layer_norm(inputs | {"x": h}), h


def _plain_residual_norm(inputs: Inputs) -> tuple[Tensor, ...]:
    h = inputs["residual"] + functional.dropout(inputs["x"] + inputs["bias"], P)
    return *_torch_layer_norm(inputs | {"x": h}), h


def _dropout(inputs: Inputs) -> Results:
    return (_ops().dropout(inputs["x"], P, SEED, inputs["site"], inputs["ids"], 3, 0),), ()


def _torch_dropout(inputs: Inputs) -> tuple[Tensor, ...]:
    return (inputs["x"] * _keep(inputs["x"], inputs) / (1 - P),)


def _plain_dropout(inputs: Inputs) -> tuple[Tensor, ...]:
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


def _bias_gelu(inputs: Inputs, tanh: bool) -> Results:
    y = _ops().bias_gelu(inputs["x"], inputs["bias"], tanh)
    return (y,), _ops().bias_gelu_backward(inputs["dy"], inputs["x"], inputs["bias"], tanh)


def _torch_bias_gelu(inputs: Inputs, tanh: bool) -> tuple[Tensor, ...]:
    return (functional.gelu(inputs["x"] + inputs["bias"], approximate="tanh" if tanh else "none"),)


def _loss_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    targets = torch.randint(width, (rows,), device=device)
    targets[0] = IGNORE
    logits = torch.randn(rows, width, dtype=dtype, device=device)
    return {"logits": logits, "targets": targets, "dy": torch.ones(rows, device=device)}


def _cross_entropy(inputs: Inputs) -> Results:
    logits, targets = inputs["logits"], inputs["targets"]
    return (_ops().cross_entropy_(logits, targets, SMOOTHING, Z_LOSS, IGNORE, True),), (logits,)


def _sharded_cross_entropy(inputs: Inputs) -> Results:
    """The columns in two parts, as two ranks would have them."""
    logits, targets = inputs["logits"], inputs["targets"]
    columns = logits.shape[1]
    cut = columns // 3
    parts = [(0, logits[:, :cut]), (cut, logits[:, cut:])]
    stats = torch.stack([_ops().cross_entropy_stats(part, targets, at, columns, IGNORE) for at, part in parts])
    log_sum, target, total = stats[..., 0].logsumexp(0), stats[..., 1].sum(0), stats[..., 2].sum(0)
    losses = log_sum - (1 - SMOOTHING) * target - SMOOTHING / columns * total + Z_LOSS * log_sum**2
    for at, part in parts:
        _ops().cross_entropy_gradient_(part, targets, log_sum, at, columns, SMOOTHING, Z_LOSS, IGNORE)
    return (losses * (targets != IGNORE),), (logits,)


def _torch_cross_entropy(inputs: Inputs) -> tuple[Tensor, ...]:
    logits, targets = inputs["logits"], inputs["targets"]
    x = logits if logits.dtype == torch.float64 else logits.float()
    losses = functional.cross_entropy(x, targets, reduction="none", label_smoothing=SMOOTHING, ignore_index=IGNORE)
    return (losses + Z_LOSS * x.logsumexp(1) ** 2 * (targets != IGNORE),)


def _list_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    shapes = [(rows, width), (width,), (1,), (7, rows)]
    gradients = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
    state = {name: [torch.rand(shape, device=device) for shape in shapes] for name in ("parameters", "m", "v")}
    return {"gradients": gradients, **state, "steps": [torch.tensor(3.0, device=device) for _ in shapes]}


def _norm(inputs: Inputs) -> Results:
    return (_ops().norm(inputs["gradients"]),), ()


def _torch_norm(inputs: Inputs) -> tuple[Tensor, ...]:
    return (torch.nn.utils.get_total_norm(inputs["gradients"]),)


def _adamw(inputs: Inputs) -> Results:
    lists = [inputs[name] for name in ("parameters", "gradients", "m", "v", "steps")]
    _ops().adamw_(*lists, *ADAM, False, None, None)
    return tuple(tensor for each in (lists[0], *lists[2:]) for tensor in each), ()


def _torch_adamw(inputs: Inputs) -> tuple[Tensor, ...]:
    lr, beta1, beta2, eps, decay = ADAM
    new: list[list[Tensor]] = [[], [], [], []]
    lists = [inputs[name] for name in ("parameters", "gradients", "m", "v", "steps")]
    for p, g, m, v, step in zip(*lists, strict=True):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        update = m / (1 - beta1 ** (step + 1)) / ((v / (1 - beta2 ** (step + 1))).sqrt() + eps)
        for each, tensor in zip(new, (p - lr * (decay * p + update), m, v, step + 1), strict=True):
            each.append(tensor)
    return tuple(tensor for each in new for tensor in each)


def _plain_adamw(inputs: Inputs) -> tuple[Tensor, ...]:
    lr, beta1, beta2, eps, decay = ADAM
    lists = [inputs[name] for name in ("parameters", "gradients", "m", "v")]
    lists[1] = [gradient.float() for gradient in lists[1]]
    settings = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
    torch._fused_adamw_(*lists, [], inputs["steps"], amsgrad=False, maximize=False, **settings)
    return ()


def _attention_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    qkv = torch.randn(2, rows, 4, 3, width, dtype=dtype, device=device)
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
    return {"qkv": qkv, "q": q, "k": k, "v": v, "dy": torch.randn_like(q).transpose(1, 2).contiguous().transpose(1, 2)}


def _attention(inputs: Inputs) -> Results:
    q, k, v = (inputs[name] for name in "qkv")
    out, lse = _ops().attention(q, k, v, SCALE)
    return (out,), _ops().attention_backward(inputs["dy"], out, lse, q, k, v, SCALE)


def _torch_attention(inputs: Inputs) -> tuple[Tensor, ...]:
    q, k, v = (inputs[name] for name in "qkv")
    return (functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE),)


def _attention_packed(inputs: Inputs) -> Results:
    out, lse = _ops().attention_packed(inputs["qkv"], SCALE)
    dout = inputs["dy"].transpose(1, 2)
    return (out.transpose(1, 2),), (_ops().attention_packed_backward(dout, out, lse, inputs["qkv"], SCALE),)


def _torch_attention_packed(inputs: Inputs) -> tuple[Tensor, ...]:
    parts = dict(zip("qkv", (part.transpose(1, 2) for part in inputs["qkv"].unbind(3)), strict=True))
    return _torch_attention(inputs | parts)


def _pair(name: str) -> tuple[str, str]:
    return name, f"{name}_backward"


SQUARE, WIDE, VOCABULARY = ((256, 256), (1024, 1024)), ((1024, 768), (2048, 2048)), ((1024, 8192), (1024, 50304))
CASES = (
    Case(_pair("masked_softmax"), _softmax_inputs, _masked_softmax, _torch_masked_softmax, ("x",), SQUARE, 5),
    Case(_pair("causal_softmax"), _softmax_inputs, _causal_softmax, _torch_causal_softmax, ("x",), SQUARE, 2.5),
    Case(_pair("layer_norm"), _norm_inputs, _layer_norm, _torch_layer_norm, ("x", "weight", "beta"), WIDE, 5),
    Case(
        _pair("residual_norm"),
        *(_norm_inputs, _residual_norm, _torch_residual_norm, ("x", "residual", "bias", "weight", "beta"), WIDE, 8),
        plain=_plain_residual_norm,
    ),
    Case(
        _pair("bias_gelu"),
        _norm_inputs,
        lambda inputs: _bias_gelu(inputs, True),
        lambda inputs: _torch_bias_gelu(inputs, True),
        ("x", "bias"),
        WIDE,
        5,
    ),
    Case(
        ("bias_gelu erf", "bias_gelu_backward erf"),
        _norm_inputs,
        lambda inputs: _bias_gelu(inputs, False),
        lambda inputs: _torch_bias_gelu(inputs, False),
        ("x", "bias"),
        WIDE,
        5,
    ),
    Case(("dropout",), _norm_inputs, _dropout, _torch_dropout, (), WIDE, 2, plain=_plain_dropout),
    Case(
        ("cross_entropy_", "cross_entropy_ gradient"),
        *(_loss_inputs, _cross_entropy, _torch_cross_entropy, ("logits",), VOCABULARY, 2),
    ),
    Case(
        ("cross_entropy_stats", "cross_entropy_gradient_"),
        *(_loss_inputs, _sharded_cross_entropy, _torch_cross_entropy, ("logits",), VOCABULARY, 3),
    ),
    Case(("norm",), _list_inputs, _norm, _torch_norm, (), WIDE, 1),
    Case(("adamw_",), _list_inputs, _adamw, _torch_adamw, (), WIDE, 7, plain=_plain_adamw),
    Case(
        _pair("attention"),
        *(_attention_inputs, _attention, _torch_attention, ("q", "k", "v"), ((256, 64), (1024, 64)), 4),
        cpu_only=True,
    ),
    Case(
        _pair("attention_packed"),
        *(_attention_inputs, _attention_packed, _torch_attention_packed, ("qkv",), ((256, 64), (1024, 64)), 4),
        cpu_only=True,
    ),
)
