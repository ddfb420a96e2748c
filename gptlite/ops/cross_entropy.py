"""The output head and its loss in one op, so that the logits of a batch never exist in fp32, or all at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
LOGIT_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}  # the most logits held at once
SOFTMAX_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # fp32 logits at a time: a CPU's fit its cache


@dataclass(frozen=True)
class VocabShard:
    """The rows of the table that a rank holds, where several share one.

    `first` is the first row's number and `longest` the most rows any rank holds. `gather` takes a tensor [N] or [N, 2]
    and returns every rank's, [ranks, N, ...].
    """

    first: int
    longest: int
    gather: Callable[[Tensor], Tensor]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, shard: VocabShard | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(hidden weightᵀ)[target], fp32.

    hidden [N, D]; weight [V', D] of hidden's dtype, rows from `vocab_size` on are padding and get no
    probability; targets [N] int64, IGNORE counts nothing. The gradients are computed in the forward pass, where the
    logits are at hand (as in Liger Kernel, arXiv:2410.10989), and scaled by the upstream gradient in the backward.

    With a `shard`, weight is its rows alone: the ranks exchange two floats a token (the logarithm of the sum of
    exponentials, and the target's logit), every rank returns the whole loss, and hidden's gradient is its share.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, vocab_size, shard)
    table = weight[: _rows(weight, vocab_size, shard)]
    chunks = _chunks(hidden, targets, vocab_size, shard)
    return torch.stack([_softmax_loss(h @ table.t(), t, shard, want_grad=False) for h, t in chunks]).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, shard: VocabShard | None):
        rows = _rows(weight, vocab_size, shard)
        table = weight[:rows]
        losses, dhidden, dtable = [], [], None
        for h, t in _chunks(hidden, targets, vocab_size, shard):
            logits = h @ table.t()
            losses.append(_softmax_loss(logits, t, shard, want_grad=True))
            dhidden.append(logits @ table)
            part = logits.t() @ h
            # Chunks add up in fp32: a sum of many in bf16 would lose the small ones.
            dtable = part if dtable is None else dtable.float().add_(part)
        assert dtable is not None
        dweight = torch.empty_like(weight)
        dweight[:rows], dweight[rows:] = dtable, 0
        ctx.save_for_backward(torch.cat(dhidden) if len(dhidden) > 1 else dhidden[0], dweight)
        ctx.scaled_by = None
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        dhidden, dweight = ctx.saved_tensors
        if ctx.scaled_by is not None:
            # A schedule that splits the backward pass comes twice: for hidden's gradient, then for the weight's.
            factor = grad / ctx.scaled_by
            return dhidden * factor, dweight * factor, None, None, None
        # In place: the forward pass made them for this alone. `.data`, or autograd would refuse them the second time.
        ctx.scaled_by = grad
        dhidden.data.mul_(grad)
        dweight.data.mul_(grad)
        return dhidden, dweight, None, None, None


def _rows(weight: Tensor, vocab_size: int, shard: VocabShard | None) -> int:
    """How many of a table's rows are no padding."""
    return min(len(weight), max(0, vocab_size - (shard.first if shard else 0)))


def _chunks(
    hidden: Tensor, targets: Tensor, vocab_size: int, shard: VocabShard | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of `hidden` and `targets` whose logits take LOGIT_BYTES; one empty chunk where there are no rows."""
    columns = shard.longest if shard else vocab_size  # the same on every rank, so that all exchange equally often
    rows = max(1, LOGIT_BYTES[hidden.device.type] // (columns * hidden.element_size()))
    return zip(hidden.split(rows), targets.split(rows), strict=True)


def _softmax_loss(logits: Tensor, targets: Tensor, shard: VocabShard | None, want_grad: bool) -> Tensor:
    """Sum of the losses of logits [N, V]; with `want_grad` the logits become their gradient, in place."""
    if shard is not None:
        return _sharded_softmax_loss(logits, targets, shard, want_grad)
    losses = []
    for x, t in _cache_sized(logits, targets):
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


def _sharded_softmax_loss(logits: Tensor, targets: Tensor, shard: VocabShard, want_grad: bool) -> Tensor:
    """The same of the columns from `shard.first` on; all ranks return the whole loss."""
    columns, valid = logits.shape[1], targets != IGNORE
    column = targets - shard.first
    mine = valid & (column >= 0) & (column < columns)
    if columns == 0:
        stats = logits.new_zeros(len(targets), 2, dtype=torch.float32)
        stats[:, 0] = -torch.inf
    else:
        index = column.masked_fill(~mine, 0).unsqueeze(1)
        log_sums = [torch.logsumexp(x.float(), 1) for x, _ in _cache_sized(logits, targets)]
        stats = torch.stack([torch.cat(log_sums), logits.gather(1, index).squeeze(1).float() * mine], dim=1)
    everywhere = shard.gather(stats)
    log_sum, target_logit = everywhere[..., 0].logsumexp(0), everywhere[..., 1].sum(0)
    if want_grad and columns:
        for x, t, at, has, total in _cache_sized(logits, targets, index, mine, log_sum):
            p = (x.float() - total.unsqueeze(1)).exp_()
            p.scatter_add_(1, at, -has.to(p.dtype).unsqueeze(1))
            x.copy_(p.mul_((t != IGNORE).unsqueeze(1)))
    return ((log_sum - target_logit) * valid).sum()


def _cache_sized(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of a few rows of each at a time."""
    rows = max(1, SOFTMAX_BYTES[logits.device.type] // (max(1, logits.shape[1]) * 4))
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)
