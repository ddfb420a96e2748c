"""The output head and its loss in one op, so that the logits of a batch never exist in fp32, or all at once."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
LOGIT_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}  # the most logits held at once
SOFTMAX_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}  # fp32 logits at a time: a CPU's fit its cache


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum over tokens of -log softmax(hidden weightᵀ)[target], fp32.

    hidden [N, D]; weight [V', D] of hidden's dtype, rows from `vocab_size` on are padding and get no
    probability; targets [N] int64, IGNORE counts nothing. The gradients are computed in the forward pass, where the
    logits are at hand (as in Liger Kernel, arXiv:2410.10989), and scaled by the upstream gradient in the backward.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, vocab_size)
    return _loss(hidden, weight, targets, vocab_size, None, None)


def _loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, dhidden: Tensor | None, dweight: Tensor | None
) -> Tensor:
    """The loss; where given, dhidden is filled and dweight [vocab_size, D] added to."""
    table = weight[:vocab_size]
    rows = max(1, LOGIT_BYTES[hidden.device.type] // (vocab_size * hidden.element_size()))
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for h, t, dh in zip(hidden.split(rows), targets.split(rows), _split(dhidden, rows, hidden), strict=True):
        logits = h @ table.t()
        loss += _softmax_loss(logits, t, want_grad=dh is not None)
        if dh is not None and dweight is not None:
            torch.mm(logits, table, out=dh)
            dweight += logits.t() @ h
    return loss


def _split(tensor: Tensor | None, rows: int, like: Tensor):
    return tensor.split(rows) if tensor is not None else [None] * len(like.split(rows))


def _softmax_loss(logits: Tensor, targets: Tensor, want_grad: bool) -> Tensor:
    """Sum of the losses of logits [N, V]; with `want_grad` the logits become their gradient, in place."""
    rows = max(1, SOFTMAX_BYTES[logits.device.type] // (logits.shape[1] * 4))
    losses = []
    for x, t in zip(logits.split(rows), targets.split(rows), strict=True):
        valid = t != IGNORE
        index = t.masked_fill(~valid, 0).unsqueeze(1)
        log_p = torch.log_softmax(x, dim=-1, dtype=torch.float32)
        losses.append(-(log_p.gather(1, index).squeeze(1) * valid).sum())
        if want_grad:
            p = log_p.exp_()
            p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
            x.copy_(p.mul_(valid.unsqueeze(1)))
    return torch.stack(losses).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        # Chunks add up in fp32: a sum of many in bf16 would lose the small ones.
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        with torch.no_grad():
            loss = _loss(hidden, weight, targets, vocab_size, dhidden, dweight[:vocab_size])
        ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        dhidden, dweight = ctx.saved_tensors
        # In place: the forward pass made them for this alone, and a second backward pass is refused by autograd.
        return dhidden.mul_(grad), dweight.mul_(grad), None, None
