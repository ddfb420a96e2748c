"""The output head and its loss in one op, so that the logits of a batch never exist in fp32, or all at once."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
LOGIT_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}  # the most logits held at once
SOFTMAX_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # fp32 logits at a time: a CPU's fit its cache


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum over tokens of -log softmax(hidden weightᵀ)[target], fp32.

    hidden [N, D]; weight [V', D] of hidden's dtype, rows from `vocab_size` on are padding and get no
    probability; targets [N] int64, IGNORE counts nothing. The gradients are computed in the forward pass, where the
    logits are at hand (as in Liger Kernel, arXiv:2410.10989), and scaled by the upstream gradient in the backward.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, vocab_size)
    table = weight[:vocab_size]
    losses = [_softmax_loss(h @ table.t(), t, want_grad=False) for h, t in _chunks(hidden, targets, vocab_size)]
    return torch.stack(losses).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        table = weight[:vocab_size]
        losses, dhidden, dtable = [], [], None
        for h, t in _chunks(hidden, targets, vocab_size):
            logits = h @ table.t()
            losses.append(_softmax_loss(logits, t, want_grad=True))
            dhidden.append(logits @ table)
            part = logits.t() @ h
            # Chunks add up in fp32: a sum of many in bf16 would lose the small ones.
            dtable = part if dtable is None else dtable.float().add_(part)
        assert dtable is not None
        dweight = torch.empty_like(weight)
        dweight[:vocab_size], dweight[vocab_size:] = dtable, 0
        ctx.save_for_backward(torch.cat(dhidden) if len(dhidden) > 1 else dhidden[0], dweight)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        dhidden, dweight = ctx.saved_tensors
        # In place: the forward pass made them for this alone, and a second backward pass is refused by autograd.
        return dhidden.mul_(grad), dweight.mul_(grad), None, None


def _chunks(hidden: Tensor, targets: Tensor, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of `hidden` and `targets` whose logits take LOGIT_BYTES; one empty chunk where there are no rows."""
    rows = max(1, LOGIT_BYTES[hidden.device.type] // (vocab_size * hidden.element_size()))
    return zip(hidden.split(rows), targets.split(rows), strict=True)


def _softmax_loss(logits: Tensor, targets: Tensor, want_grad: bool) -> Tensor:
    """Sum of the losses of logits [N, V]; with `want_grad` the logits become their gradient, in place."""
    rows = max(1, SOFTMAX_BYTES[logits.device.type] // (logits.shape[1] * 4))
    losses = []
    for x, t in zip(logits.split(rows), targets.split(rows), strict=True):
        valid = t != IGNORE
        index = t.masked_fill(~valid, 0).unsqueeze(1)
        p = torch.softmax(x, dim=-1, dtype=torch.float32)
        # log(sum exp x) = max x - log(max p), from the exponentials softmax has computed: a log_softmax would take
        # them again for the gradient. The largest p is at least 1/V, so its logarithm is accurate.
        log_sum = x.amax(1).float() - p.amax(1).log()
        losses.append(((log_sum - x.gather(1, index).squeeze(1).float()) * valid).sum())
        if want_grad:
            p.scatter_add_(1, index, torch.full_like(index, -1, dtype=p.dtype))
            x.copy_(p.mul_(valid.unsqueeze(1)))
    return torch.stack(losses).sum()
