"""Every op with made-up arguments, and the same in torch's own ops: for `test` and `bench`."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gptlite.kernels.case import Case, Inputs, Tensors, ops, pair, size_of, times
from gptlite.kernels.cases_rows import ROWS, SCALE

IGNORE, SMOOTHING, Z_LOSS = -100, 0.1, 1e-3
ADAM = (1e-3, 0.9, 0.95, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight_decay
VOCABULARY = ((1024, 8192), (1024, 50304)), ((8192, 8192), (8192, 50304))
LISTS = ((1024, 768), (2048, 2048)), ((2048, 2048), (16384, 8192))
HEADS = ((256, 64), (1024, 64)), ()


def _loss_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    targets = torch.randint(width, (rows,), device=device)
    targets[0] = IGNORE
    logits = torch.randn(rows, width, dtype=dtype, device=device)
    return {"logits": logits, "targets": targets, "dy": torch.ones(rows, device=device)}


def _cross_entropy(inputs: Inputs, smoothing: float, z_loss: float) -> Tensors:
    logits, targets = inputs["logits"], inputs["targets"]
    return ops().cross_entropy_(logits, targets, smoothing, z_loss, IGNORE, True), logits


def _stats(inputs: Inputs) -> Tensors:
    """Of the columns in two parts, as two ranks would have them."""
    columns = inputs["logits"].shape[1]
    return tuple(ops().cross_entropy_stats(part, inputs["targets"], at, columns, IGNORE) for at, part in _parts(inputs))


def _losses_of_stats(inputs: Inputs, parts: Tensors) -> Tensors:
    """The losses, and the logarithms of the sums of exponentials."""
    stats = torch.stack(parts)
    log_sum, target, total = stats[..., 0].logsumexp(0), stats[..., 1].sum(0), stats[..., 2].sum(0)
    smoothed = SMOOTHING / inputs["logits"].shape[1] * total
    losses = log_sum - (1 - SMOOTHING) * target - smoothed + Z_LOSS * log_sum**2
    return losses * (inputs["targets"] != IGNORE), log_sum


def _sharded_gradient(inputs: Inputs, results: Tensors) -> Tensors:
    columns = inputs["logits"].shape[1]
    options = columns, SMOOTHING, Z_LOSS, IGNORE
    for at, part in _parts(inputs):
        ops().cross_entropy_gradient_(part, inputs["targets"], results[1], at, *options)
    return (inputs["logits"],)


def _parts(inputs: Inputs) -> list[tuple[int, Tensor]]:
    cut = inputs["logits"].shape[1] // 3
    return [(0, inputs["logits"][:, :cut]), (cut, inputs["logits"][:, cut:])]


def _torch_cross_entropy(inputs: Inputs, smoothing: float = SMOOTHING, z_loss: float = Z_LOSS) -> Tensors:
    logits, targets = inputs["logits"], inputs["targets"]
    x = logits if logits.dtype == torch.float64 else logits.float()
    losses = functional.cross_entropy(x, targets, reduction="none", label_smoothing=smoothing, ignore_index=IGNORE)
    if not z_loss:
        return (losses,)
    return (losses + z_loss * x.logsumexp(1) ** 2 * (targets != IGNORE),)


def _list_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    shapes = [(rows, width), (width,), (1,), (7, rows)]
    gradients = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
    state = {name: [torch.rand(shape, device=device) for shape in shapes] for name in ("parameters", "m", "v")}
    return {"gradients": gradients, **state, "steps": [torch.tensor(3.0, device=device) for _ in shapes]}


def _norm(inputs: Inputs) -> Tensors:
    return (ops().norm(inputs["gradients"]),)


def _torch_norm(inputs: Inputs) -> Tensors:
    return (torch.nn.utils.get_total_norm(inputs["gradients"]),)


def _adamw(inputs: Inputs) -> Tensors:
    lists = [inputs[name] for name in ("parameters", "gradients", "m", "v", "steps")]
    ops().adamw_(*lists, *ADAM, False, None, None)
    return tuple(tensor for each in (lists[0], *lists[2:]) for tensor in each)


def _adamw_traffic(inputs: Inputs) -> tuple[float, ...]:
    """Parameters and both moments are read and written, gradients read."""
    state = sum(size_of(inputs[name]) for name in ("parameters", "m", "v"))
    return (size_of(inputs["gradients"]) + 2 * state,)


def _torch_adamw(inputs: Inputs) -> Tensors:
    lr, beta1, beta2, eps, decay = ADAM
    new: list[list[Tensor]] = [[], [], [], []]
    lists = [inputs[name] for name in ("parameters", "gradients", "m", "v", "steps")]
    for p, g, m, v, step in zip(*lists, strict=True):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        update = m / (1 - beta1 ** (step + 1)) / ((v / (1 - beta2 ** (step + 1))).sqrt() + eps)
        for each, tensor in zip(new, (p - lr * (decay * p + update), m, v, step + 1), strict=True):
            each.append(tensor)
    return tuple(tensor for each in new for tensor in each)


def _plain_adamw(inputs: Inputs) -> Tensors:
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


def _attention(inputs: Inputs) -> Tensors:
    return ops().attention(*(inputs[name] for name in "qkv"), SCALE)


def _attention_backward(inputs: Inputs, results: Tensors) -> Tensors:
    return ops().attention_backward(inputs["dy"], *results, *(inputs[name] for name in "qkv"), SCALE)


def _torch_attention(inputs: Inputs) -> Tensors:
    q, k, v = (inputs[name] for name in "qkv")
    return (functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE),)


def _attention_packed(inputs: Inputs) -> Tensors:
    out, lse = ops().attention_packed(inputs["qkv"], SCALE)
    return out.transpose(1, 2), lse


def _attention_packed_backward(inputs: Inputs, results: Tensors) -> Tensors:
    dout, out = (each.transpose(1, 2) for each in (inputs["dy"], results[0]))
    return (ops().attention_packed_backward(dout, out, results[1], inputs["qkv"], SCALE),)


def _torch_attention_packed(inputs: Inputs) -> Tensors:
    parts = dict(zip("qkv", (part.transpose(1, 2) for part in inputs["qkv"].unbind(3)), strict=True))
    return _torch_attention(inputs | parts)


CASES = (
    *ROWS,
    *(
        Case(
            (f"cross_entropy_{name}", f"cross_entropy_{name} gradient"),
            *(_loss_inputs, partial(_cross_entropy, smoothing=smoothing, z_loss=z_loss), None),
            *(partial(_torch_cross_entropy, smoothing=smoothing, z_loss=z_loss), ("logits",), *VOCABULARY),
            traffic=times(2),
        )
        for name, smoothing, z_loss in (("", SMOOTHING, Z_LOSS), (" plain", 0.0, 0.0))
    ),
    Case(
        ("cross_entropy_stats", "cross_entropy_gradient_"),
        *(_loss_inputs, _stats, _sharded_gradient, _torch_cross_entropy, ("logits",), *VOCABULARY),
        traffic=times(1, 2),
        between=_losses_of_stats,
    ),
    Case(("norm",), _list_inputs, _norm, None, _torch_norm, (), *LISTS, traffic=times(1)),
    Case(
        ("adamw_",),
        *(_list_inputs, _adamw, None, _torch_adamw, (), *LISTS),
        traffic=_adamw_traffic,
        plain=_plain_adamw,
        compared=None,
    ),
    # The first input has queries, keys and values: a third each.
    Case(
        pair("attention"),
        *(_attention_inputs, _attention, _attention_backward, _torch_attention, ("q", "k", "v"), *HEADS),
        traffic=times(4 / 3, 8 / 3),
        cpu_only=True,
    ),
    Case(
        pair("attention_packed"),
        *(_attention_inputs, _attention_packed, _attention_packed_backward, _torch_attention_packed, ("qkv",), *HEADS),
        traffic=times(4 / 3, 8 / 3),
        cpu_only=True,
    ),
)
