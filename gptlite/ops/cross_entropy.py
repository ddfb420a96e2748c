"""The output head and its loss in one op, so that the logits of a batch never exist in fp32, or all at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.config import PRODUCTS, SOFTMAX_BYTES, CrossEntropy, logit_rows
from gptlite.ops.embedding import TableGradient
from gptlite.ops.linear import linear_gradients, product
from gptlite.ops.weight_copies import as_dtype

IGNORE = -100


@dataclass(frozen=True)
class VocabShard:
    """The rows of the table that a rank holds, where several share one.

    `first` is the first row's number and `longest` the most rows any rank holds. `gather` takes a tensor [N, 3] and
    returns every rank's, [ranks, N, 3].
    """

    first: int
    longest: int
    gather: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossTerms:
    """What is added to -log softmax(logits)[target].

    Label smoothing e takes e of the target's weight and spreads it over the whole vocabulary (arXiv:1512.00567);
    z_loss times the square of log sum exp keeps the logits from drifting (arXiv:2204.02311).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class LossGradient:
    """What is known beforehand of the gradients of a loss.

    `upstream`: what they will be multiplied by, so that the logits' can be, in the pass that makes them; another
    factor that then comes costs a pass over the table's gradient, as any does on a GPU. `table`: takes that gradient,
    where the table is an embedding's too: there is none for autograd then.
    """

    upstream: float | None = None
    table: TableGradient | None = None


NO_TERMS = LossTerms()
NOTHING_KNOWN = LossGradient()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    shard: VocabShard | None = None,
    choice: CrossEntropy = CrossEntropy.chunked,
    terms: LossTerms = NO_TERMS,
    fused_linear: bool = False,
    known: LossGradient = NOTHING_KNOWN,
) -> Tensor:
    """Sum over tokens of -log softmax(hidden weightᵀ)[target] and the other terms, fp32.

    hidden [N, D]; weight [V', D], multiplied in hidden's dtype, rows from `vocab_size` on are padding and get no
    probability and no gradient; targets [N] int64, IGNORE counts nothing. `reference` writes the logits out in fp32, as
    the formula has it. Otherwise gradients are computed in the forward pass, where the logits are at hand (as in Liger
    Kernel, arXiv:2410.10989), and scaled by the upstream gradient in the backward, if that is not the one that was
    `known`. Where products are aligned (see Products) they take the padding along, as zeros.

    With a `shard`, weight is its rows alone: the ranks exchange three floats a token (the logarithm of the sum of
    exponentials, the target's logit, the logits' sum), every rank returns the whole loss, and hidden's gradient is its
    share. No path writes whole logits then.
    """
    if not PRODUCTS[hidden.device.type].aligned:
        weight = as_dtype(weight, hidden.dtype)  # else the cast writes the aligned table
    if choice is CrossEntropy.reference and shard is None:
        return _written_out(hidden @ weight[:vocab_size].to(hidden.dtype).t(), targets, terms)
    # In fp16 the gradients of single logits, divided by a batch's number of tokens, would be lost.
    upstream = None if hidden.dtype == torch.float16 else known.upstream
    loss = _Loss(vocab_size, shard, choice is CrossEntropy.fused, terms, fused_linear, upstream)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, loss, known.table)
    table, rows = loss.table(weight, hidden.dtype), loss.rows(weight)
    return torch.stack(
        [loss.of((h @ table.t())[:, :rows], t, want_grad=False) for h, t in loss.chunks(hidden, targets, weight)]
    ).sum()


def _written_out(logits: Tensor, targets: Tensor, terms: LossTerms) -> Tensor:
    logits = logits.float()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=terms.label_smoothing)
    if terms.z_loss:
        loss = loss + terms.z_loss * (logits.logsumexp(1).square() * (targets != IGNORE)).sum()
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, loss: "_Loss", shared: TableGradient | None
    ) -> Tensor:
        rows, table = loss.rows(weight), loss.table(weight, hidden.dtype)
        losses, dhidden, dtable = [], [], None
        chunks = list(loss.chunks(hidden, targets, weight))
        # Chunks add up in fp32: a sum of many in bf16 would lose the small ones.
        dtype = torch.float32 if len(chunks) > 1 else torch.promote_types(weight.dtype, hidden.dtype)
        for h, t in chunks:
            logits = h @ table.t()
            losses.append(loss.of(logits[:, :rows], t, want_grad=True))  # the padding's are 0, and stay
            dhidden.append(logits @ table)
            dtable = loss.table_gradient(logits, h, table, dtype, dtable)
            del logits  # before the next are there
        assert dtable is not None
        if len(dtable) >= len(weight):
            dweight = dtable[: len(weight)].to(weight.dtype)
        else:
            dweight = torch.empty_like(weight)
            dweight[:rows], dweight[rows:] = dtable, 0
        ctx.save_for_backward(torch.cat(dhidden) if len(dhidden) > 1 else dhidden[0], dweight)
        ctx.upstream, ctx.scaled_by, ctx.shared = loss.upstream, None, shared
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        dhidden, dweight = ctx.saved_tensors
        if ctx.scaled_by is not None:
            # A schedule that splits the backward pass comes twice: for hidden's gradient, then for the weight's.
            if ctx.shared is not None:
                raise RuntimeError("the backward pass a second time: the table's gradient has been given away")
            factor = grad / ctx.scaled_by
            return dhidden * factor, dweight * factor, None, None, None
        ctx.scaled_by = grad
        factor = grad if ctx.upstream is None else grad / ctx.upstream
        # To look at a factor on a GPU would be to wait for it, tens of milliseconds of work behind: there they are
        # multiplied whatever it is, 0.4 GB at GPT-3 Small, 95 us of a micro-batch's 55 ms on an H200.
        if ctx.upstream is None or grad.device.type != "cpu" or factor != 1:
            # In place: the forward pass made them for this alone. `.data`, or autograd would refuse them next time.
            dhidden.data.mul_(factor)
            dweight.data.mul_(factor)
        if ctx.shared is None:
            return dhidden, dweight, None, None, None
        ctx.shared.put(dweight)
        return dhidden, None, None, None, None


@dataclass(frozen=True)
class _Loss:
    """The sum of the losses of logits [N, V], and their gradient in the logits' place."""

    vocab_size: int
    shard: VocabShard | None
    fused: bool
    terms: LossTerms
    fused_linear: bool
    upstream: float | None  # what the gradient is multiplied by, if anything

    @property
    def scale(self) -> float:
        """Of the logits' gradient."""
        return 1.0 if self.upstream is None else self.upstream

    def rows(self, weight: Tensor) -> int:
        """How many of a table's rows are no padding."""
        return min(len(weight), max(0, self.vocab_size - (self.shard.first if self.shard else 0)))

    def table(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The right operand of the logits' product, in its dtype: the rows that are no padding.

        Where products are aligned they and zeros for the rest, up to a multiple: a copy, which a cast is anyway. What
        is in the padding must not come into hidden's gradient: 0 times NaN is NaN. With zeros there, the padding's
        logits are 0, and are its gradients. (Where the table has the dtype already the copy moves 154 MB at GPT-3
        Small, 36 us on an H200, of a micro-batch's 55 ms.)
        """
        rows, products = self.rows(weight), PRODUCTS[weight.device.type]
        if not products.aligned:
            return weight[:rows]
        whole, weight = products.up(len(weight)), as_dtype(weight, dtype)
        if rows == whole:
            return weight
        table = weight.new_empty(whole, weight.shape[1], dtype=dtype)
        table[:rows], table[rows:] = weight[:rows], 0
        return table

    def table_gradient(
        self, dlogits: Tensor, hidden: Tensor, table: Tensor, dtype: torch.dtype, before: Tensor | None
    ) -> Tensor:
        """That of a chunk and of the chunks `before`; of one chunk alone maybe in the products' dtype."""
        if PRODUCTS[table.device.type].aligned:
            return product(dlogits.t(), hidden, dtype, before)
        part = linear_gradients(dlogits, hidden, table, None, self.fused_linear)[0]
        return part if before is None else before.float().add_(part)

    def chunks(self, hidden: Tensor, targets: Tensor, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of `hidden` and `targets` whose logits exist at a time; one empty chunk where there are no rows."""
        # The same on every rank, so that all exchange equally often.
        device = hidden.device.type
        whole = len(weight) if PRODUCTS[device].aligned else self.vocab_size
        columns = self.shard.longest if self.shard else whole
        rows = logit_rows(device, len(hidden), columns, hidden.element_size())
        return zip(hidden.split(rows), targets.split(rows), strict=True)

    def of(self, logits: Tensor, targets: Tensor, want_grad: bool) -> Tensor:
        """With `want_grad` the logits become their gradient."""
        if self.shard is not None:
            return self._sharded(logits, targets, self.shard, want_grad)
        if self.fused:
            terms = self.terms
            losses = torch.ops.gptlite.cross_entropy_(
                logits, targets, terms.label_smoothing, terms.z_loss, IGNORE, want_grad, self.scale
            )
            return losses.sum()
        losses = []
        for x, t in _cache_sized(logits, targets):
            p = torch.softmax(x, dim=-1, dtype=torch.float32)
            # log(sum exp x) = max x - log(max p), from the exponentials softmax has computed: a log_softmax would take
            # them again for the gradient. The largest p is at least 1/V, so its logarithm is accurate.
            log_sum = x.amax(1).float() - p.amax(1).log()
            valid = t != IGNORE
            index = t.masked_fill(~valid, 0).unsqueeze(1)
            total = x.sum(1, dtype=torch.float32) if self.terms.label_smoothing else None
            losses.append(self._sum(log_sum, x.gather(1, index).squeeze(1).float(), total, valid))
            if want_grad:
                x.copy_(self._gradient(p, log_sum, index, valid, valid))
        return torch.stack(losses).sum()

    def _sum(self, log_sum: Tensor, target_logit: Tensor, total: Tensor | None, valid: Tensor) -> Tensor:
        """From each row's log sum exp, its target's logit and, for label smoothing, the sum of its logits."""
        smoothing = self.terms.label_smoothing
        loss = log_sum - (1 - smoothing) * target_logit
        if smoothing and total is not None:
            loss = loss - smoothing / self.vocab_size * total
        if self.terms.z_loss:
            loss = loss + self.terms.z_loss * log_sum.square()
        return torch.where(valid, loss, 0.0).sum()

    def _gradient(self, p: Tensor, log_sum: Tensor, index: Tensor, mine: Tensor, valid: Tensor) -> Tensor:
        """From probabilities [N, V], in their place. `mine`: rows whose target is the column `index` [N, 1]."""
        terms = self.terms
        if terms.z_loss:
            p.mul_((1 + 2 * terms.z_loss * log_sum).unsqueeze(1))
        if terms.label_smoothing:
            p.sub_(terms.label_smoothing / self.vocab_size)
        p.scatter_add_(1, index, (mine.to(p.dtype) * (terms.label_smoothing - 1)).unsqueeze(1))
        if self.scale != 1.0:
            p.mul_(self.scale)
        return p.masked_fill_(~valid.unsqueeze(1), 0.0)

    def _sharded(self, logits: Tensor, targets: Tensor, shard: VocabShard, want_grad: bool) -> Tensor:
        """The same of the columns from `shard.first` on; all ranks return the whole loss."""
        columns, valid = logits.shape[1], targets != IGNORE
        column = targets - shard.first
        mine = valid & (column >= 0) & (column < columns)
        index = column.masked_fill(~mine, 0).unsqueeze(1)
        if self.fused:
            stats = torch.ops.gptlite.cross_entropy_stats(logits, targets, shard.first, self.vocab_size, IGNORE)
        else:
            stats = _stats(logits, index, mine)
        everywhere = shard.gather(stats)
        log_sum = everywhere[..., 0].logsumexp(0)
        target_logit, total = everywhere[..., 1].sum(0), everywhere[..., 2].sum(0)
        if want_grad and columns and self.fused:
            terms = (self.terms.label_smoothing, self.terms.z_loss, IGNORE, self.scale)
            torch.ops.gptlite.cross_entropy_gradient_(logits, targets, log_sum, shard.first, self.vocab_size, *terms)
        elif want_grad and columns:
            for x, at, has, log, ok in _cache_sized(logits, index, mine, log_sum, valid):
                x.copy_(self._gradient((x.float() - log.unsqueeze(1)).exp_(), log, at, has, ok))
        return self._sum(log_sum, target_logit, total, valid)


def _stats(logits: Tensor, index: Tensor, mine: Tensor) -> Tensor:
    """[N, 3] fp32: log sum exp, the target's logit or 0, the sum of the logits; of no columns -inf, 0, 0."""
    if logits.shape[1] == 0:
        stats = logits.new_zeros(len(logits), 3, dtype=torch.float32)
        stats[:, 0] = -torch.inf
        return stats
    rows = [(torch.logsumexp(x.float(), 1), x.sum(1, dtype=torch.float32)) for (x,) in _cache_sized(logits)]
    log_sum, total = (torch.cat(each) for each in zip(*rows, strict=True))
    return torch.stack([log_sum, logits.gather(1, index).squeeze(1).float() * mine, total], dim=1)


def _cache_sized(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of a few rows of each at a time."""
    rows = max(1, SOFTMAX_BYTES[logits.device.type] // (max(1, logits.shape[1]) * 4))
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)
