"""Output head and loss in one op. Except with `reference`, logits are computed in chunks of limited size, and only
small blocks of them are in fp32."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.config import E5M2_ONE, FP8_PRODUCTS, PRODUCTS, SOFTMAX_BYTES, CrossEntropy, logit_rows
from gptlite.ops.embedding import TableGradient
from gptlite.ops.inputs import IGNORE
from gptlite.ops.linear import linear_gradients, product
from gptlite.ops.weight_copies import as_dtype


@dataclass(frozen=True)
class VocabShard:
    """Rows of the head's weight on this rank, if the vocabulary is sharded over ranks.

    `first` is the index of the first row and `longest` the largest number of rows on a rank. `gather` takes a tensor
    [N, 2] and returns those of all ranks, [ranks, N, 2].
    """

    first: int
    longest: int
    gather: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossTerms:
    """Modifications of the loss -log softmax(logits)[target].

    With a `softcap` c > 0, logits are first replaced by c tanh(logits / c) (Gemma 2, arXiv:2408.00118). `z_loss` is the
    coefficient of the squared log-sum-exp, which keeps the logits from drifting (PaLM, arXiv:2204.02311).
    """

    z_loss: float = 0.0
    softcap: float = 0.0

    def in_mode(self, training: bool) -> "LossTerms":
        """Return the terms for training or evaluation. Evaluation has no z-loss: perplexity needs the cross entropy."""
        return self if training else replace(self, z_loss=0.0)


@dataclass(frozen=True)
class LossGradient:
    """Properties of a loss's gradients that are known before the backward pass.

    `upstream`: the gradient with respect to the loss, by which the logits' gradients are multiplied when they are
    computed. If the backward pass gets a different value, and always on a GPU, rescaling takes a pass over the weight's
    gradient. `table`: receives the gradient of a weight that the embedding shares; autograd then gets no gradient of
    the weight from this op.
    """

    upstream: float | None = None
    table: TableGradient | None = None


@dataclass(frozen=True)
class HeadGemms:
    """Kind of the head's three GEMMs. `fused`: the weight's gradient is computed as in ops/linear.py. `fp8`: operands
    are quantized to fp8 (ops/fp8.py)."""

    fused: bool = False
    fp8: bool = False


NO_TERMS = LossTerms()
NOTHING_KNOWN = LossGradient()
PLAIN_GEMMS = HeadGemms()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    shard: VocabShard | None = None,
    choice: CrossEntropy = CrossEntropy.chunked,
    terms: LossTerms = NO_TERMS,
    gemms: HeadGemms = PLAIN_GEMMS,
    known: LossGradient = NOTHING_KNOWN,
) -> Tensor:
    """Return the sum over tokens of -log softmax(hidden weightᵀ)[target] and the other terms, fp32.

    hidden [N, D]; weight [V', D], cast to hidden's dtype; rows from `vocab_size` on are padding, without probability or
    gradient; targets [N] int64, where IGNORE is not counted. `reference` computes all logits in fp32, directly from the
    formula. The other paths compute gradients in the forward pass, while the logits exist (as in Liger Kernel,
    arXiv:2410.10989). The backward pass scales the gradients by the upstream gradient, unless that is `known.upstream`.
    Aligned GEMMs (see Products) include the padding, as zeros.

    With a `shard`, weight holds only this rank's rows. The ranks exchange two floats per token (log-sum-exp, the
    target's logit). Every rank returns the whole loss, and this rank's share of hidden's gradient.
    `reference` then works like `chunked`, as with GEMMs in fp8.
    """
    if not (gemms.fp8 or PRODUCTS[hidden.device.type].aligned):
        weight = as_dtype(weight, hidden.dtype)  # otherwise the cast is part of writing the aligned table
    if choice is CrossEntropy.reference and shard is None and not gemms.fp8:
        return _written_out(hidden @ weight[:vocab_size].to(hidden.dtype).t(), targets, terms)
    # In fp16, gradients of single logits divided by a batch's number of tokens would underflow.
    upstream = None if hidden.dtype == torch.float16 else known.upstream
    loss = _Loss(vocab_size, shard, choice is CrossEntropy.fused, terms, gemms, upstream)
    # In grad mode, gradients are always computed with the loss. Evaluation runs without grad mode.
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, loss, known.table)
    products, rows = loss.products(weight, hidden.dtype), loss.rows(weight)
    return torch.stack(
        [loss.of(products.logits(h)[:, :rows], t, None) for h, t in loss.chunks(hidden, targets, weight)]
    ).sum()


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return cap tanh(logits / cap); the logits themselves if `cap` is 0."""
    return cap * torch.tanh(logits / cap) if cap else logits


def _written_out(logits: Tensor, targets: Tensor, terms: LossTerms) -> Tensor:
    logits = soft_capped(logits.float(), terms.softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    if terms.z_loss:
        loss = loss + terms.z_loss * (logits.logsumexp(1).square() * (targets != IGNORE)).sum()
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, loss: "_Loss", shared: TableGradient | None
    ) -> Tensor:
        rows, products = loss.rows(weight), loss.products(weight, hidden.dtype)
        losses, dhidden, dtable = [], [], None
        chunks = list(loss.chunks(hidden, targets, weight))
        # Chunks are summed in fp32: a bf16 sum of many chunks would lose small terms.
        dtype = torch.float32 if len(chunks) > 1 else torch.promote_types(weight.dtype, hidden.dtype)
        for h, t in chunks:
            logits = products.logits(h)
            gradient = products.memory(logits)
            losses.append(loss.of(logits[:, :rows], t, gradient[:, :rows]))  # the padding's gradient stays 0
            del logits  # free them as soon as possible
            dhidden.append(products.hidden_gradient(gradient))
            dtable = products.table_gradient(gradient, h, dtype, dtable)
            del gradient  # free it before the next chunk
        assert dtable is not None
        if len(dtable) >= len(weight):
            dweight = dtable[: len(weight)].to(weight.dtype)
        else:
            dweight = torch.empty_like(weight)
            dweight[:rows] = dtable
            dweight[rows:].zero_()  # assigning 0 would make a tensor on the host
        ctx.save_for_backward(torch.cat(dhidden) if len(dhidden) > 1 else dhidden[0], dweight)
        ctx.upstream, ctx.scaled_by, ctx.shared = loss.upstream, None, shared
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        dhidden, dweight = ctx.saved_tensors
        if ctx.scaled_by is not None:
            # A schedule that splits the backward pass runs it twice: for hidden's gradient, then for the weight's.
            if ctx.shared is not None:
                raise RuntimeError("second backward pass: the tied weight's gradient has already been passed on")
            factor = grad / ctx.scaled_by
            return dhidden * factor, dweight * factor, None, None, None
        ctx.scaled_by = grad
        factor = grad if ctx.upstream is None else grad / ctx.upstream
        # Reading the factor on a GPU would synchronize, after tens of milliseconds of queued work. So a GPU always
        # multiplies. For GPT-3 Small, this moves 0.4 GB, in 95 us of a micro-batch's 55 ms on an H200.
        if ctx.upstream is None or grad.device.type != "cpu" or factor != 1:
            # In place, since nothing else uses these tensors. By way of `.data`, since autograd would otherwise reject
            # the modified saved tensors in a second backward pass.
            dhidden.data.mul_(factor)
            dweight.data.mul_(factor)
        if ctx.shared is None:
            return dhidden, dweight, None, None, None
        ctx.shared.put(dweight)
        return dhidden, None, None, None, None


class HeadProducts:
    """The head's GEMMs of hidden states [n, D] and their gradients, with a table [columns, D] made of the weight."""

    def __init__(self, table: Tensor, fused: bool) -> None:
        self.table, self.fused = table, fused

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, columns] of a chunk."""
        return hidden @ self.table.t()

    def memory(self, logits: Tensor) -> Tensor:
        """Return the memory for the gradient of a chunk's logits, with zeros at the padding: the logits' own."""
        return logits

    def hidden_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of a chunk's hidden states from that of its logits."""
        return gradient @ self.table

    def table_gradient(self, gradient: Tensor, hidden: Tensor, dtype: torch.dtype, before: Tensor | None) -> Tensor:
        """Return a chunk's gradient of the table, added to `before`, the sum over earlier chunks, if there is one."""
        if PRODUCTS[hidden.device.type].aligned:
            return product(gradient.t(), hidden, dtype, before)
        part = linear_gradients(gradient, hidden, self.table, None, self.fused)[0]
        return part if before is None else before.float().add_(part)


@dataclass(frozen=True)
class _Loss:
    """Computation of the summed loss of logits [N, V], and of the logits' gradient. If that is in e5m2, it is
    multiplied by E5M2_ONE instead of `upstream`."""

    vocab_size: int
    shard: VocabShard | None
    fused: bool
    terms: LossTerms
    gemms: HeadGemms
    upstream: float | None  # factor of the gradient; None means 1

    @property
    def scale(self) -> float:
        """Factor of the logits' gradient."""
        return E5M2_ONE if self.gemms.fp8 else 1.0 if self.upstream is None else self.upstream

    def products(self, weight: Tensor, dtype: torch.dtype) -> Any:
        """Return the HeadProducts of a weight, or those in fp8, for hidden states in `dtype`."""
        if not self.gemms.fp8:
            return HeadProducts(self.table(weight, dtype), self.gemms.fused)
        from gptlite.ops.fp8 import Fp8HeadProducts

        return Fp8HeadProducts(weight, self.rows(weight), partial(self.table, weight, dtype), self.upstream)

    def rows(self, weight: Tensor) -> int:
        """Return the number of rows of a weight that are not padding."""
        return min(len(weight), max(0, self.vocab_size - (self.shard.first if self.shard else 0)))

    def table(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight as operand of the logits' GEMM, without padding rows.

        With aligned GEMMs, the result is a copy in `dtype`, padded with zeros to a multiple; a cast would copy anyway.
        The padding's contents must not reach hidden's gradient, since 0 times NaN is NaN. With zeros, the padding's
        logits are 0 and equal their gradients. (If the weight already has the dtype, the copy moves 154 MB for GPT-3
        Small, in 36 us of a micro-batch's 55 ms on an H200.)
        """
        rows, products = self.rows(weight), FP8_PRODUCTS if self.gemms.fp8 else PRODUCTS[weight.device.type]
        if not products.aligned:
            return weight[:rows]
        whole, weight = products.up(len(weight)), as_dtype(weight, dtype)
        if rows == whole:
            return weight
        table = weight.new_empty(whole, weight.shape[1], dtype=dtype)
        table[:rows] = weight[:rows]
        table[rows:].zero_()
        return table

    def chunks(self, hidden: Tensor, targets: Tensor, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of `hidden` and `targets` for each chunk of logits. Without rows, there is one empty chunk."""
        # Every rank must have the same number of chunks, so that collectives match.
        device = hidden.device.type
        whole = len(weight) if PRODUCTS[device].aligned else self.vocab_size
        columns = self.shard.longest if self.shard else whole
        rows = logit_rows(device, len(hidden), columns, hidden.element_size())
        return zip(hidden.split(rows), targets.split(rows), strict=True)

    def of(self, logits: Tensor, targets: Tensor, gradient: Tensor | None) -> Tensor:
        """Return the sum of the losses, and write their gradient into `gradient`, unless that is None. It may be the
        logits themselves; if not, it is in e5m2, and the logits may be overwritten."""
        cap = self.terms.softcap
        if not cap:
            return self._of_capped(logits, targets, gradient)
        tanh = torch.tanh(logits / cap)
        loss = self._of_capped(torch.mul(tanh, cap, out=logits), targets, None if gradient is None else logits)
        if gradient is not None:
            _write(logits.mul_(tanh.square_().neg_().add_(1)), gradient)  # times the derivative of the cap
        return loss

    def _of_capped(self, logits: Tensor, targets: Tensor, gradient: Tensor | None) -> Tensor:
        if self.shard is not None:
            return self._sharded(logits, targets, self.shard, gradient)
        if self.fused:
            options = self.terms.z_loss, IGNORE, gradient is not None, self.scale, _apart(logits, gradient)
            return torch.ops.gptlite.cross_entropy_(logits, targets, *options).sum()
        losses = []
        for x, t, out in _cache_sized(logits, targets, logits if gradient is None else gradient):
            p = torch.softmax(x, dim=-1, dtype=torch.float32)
            # log(sum exp x) = max x - log(max p) reuses the exponentials of softmax; with log_softmax, the gradient
            # would compute them again. The largest p is at least 1/V, so its logarithm is accurate.
            log_sum = x.amax(1).float() - p.amax(1).log()
            valid = t != IGNORE
            index = t.masked_fill(~valid, 0).unsqueeze(1)  # any valid column: the row does not count
            losses.append(self._sum(log_sum, x.gather(1, index).squeeze(1).float(), valid))
            if gradient is not None:
                _write(self._gradient(p, log_sum, index, valid, valid), out)
        return torch.stack(losses).sum()

    def _sum(self, log_sum: Tensor, target_logit: Tensor, valid: Tensor) -> Tensor:
        """Return the summed loss from each row's log-sum-exp and target logit."""
        loss = log_sum - target_logit
        if self.terms.z_loss:
            loss = loss + self.terms.z_loss * log_sum.square()
        return torch.where(valid, loss, 0.0).sum()

    def _gradient(self, p: Tensor, log_sum: Tensor, index: Tensor, mine: Tensor, valid: Tensor) -> Tensor:
        """Overwrite probabilities p [N, V] with the gradient. `mine`: rows whose target is column `index` [N, 1]."""
        if self.terms.z_loss:
            p.mul_((1 + 2 * self.terms.z_loss * log_sum).unsqueeze(1))
        p.scatter_add_(1, index, -mine.to(p.dtype).unsqueeze(1))
        if self.scale != 1.0:
            p.mul_(self.scale)
        return p.masked_fill_(~valid.unsqueeze(1), 0.0)

    def _sharded(self, logits: Tensor, targets: Tensor, shard: VocabShard, gradient: Tensor | None) -> Tensor:
        """Return the loss from the logits of this rank's rows of the weight. All ranks return the whole loss."""
        columns, valid = logits.shape[1], targets != IGNORE
        column = targets - shard.first
        mine = valid & (column >= 0) & (column < columns)
        index = column.masked_fill(~mine, 0).unsqueeze(1)
        if self.fused:
            stats = torch.ops.gptlite.cross_entropy_stats(logits, targets, shard.first, IGNORE)
        else:
            stats = _stats(logits, index, mine)
        everywhere = shard.gather(stats)
        log_sum = everywhere[..., 0].logsumexp(0)  # a rank without columns gives -inf, and adds nothing
        target_logit = everywhere[..., 1].sum(0)
        if gradient is not None and columns and self.fused:
            options = shard.first, self.terms.z_loss, IGNORE, self.scale, _apart(logits, gradient)
            torch.ops.gptlite.cross_entropy_gradient_(logits, targets, log_sum, *options)
        elif gradient is not None and columns:
            for x, at, has, log, ok, out in _cache_sized(logits, index, mine, log_sum, valid, gradient):
                _write(self._gradient((x.float() - log.unsqueeze(1)).exp_(), log, at, has, ok), out)
        return self._sum(log_sum, target_logit, valid)


def _apart(logits: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return the bytes of a gradient in e5m2 for a kernel; None for one that overwrites the logits."""
    return None if gradient is None or gradient.dtype == logits.dtype else gradient.view(torch.uint8)


def _write(values: Tensor, gradient: Tensor) -> None:
    """Copy `values` into `gradient`, unless they are the same. In e5m2, larger values than the largest become that."""
    if gradient.dtype == torch.float8_e5m2:
        most = torch.finfo(gradient.dtype).max
        values.clamp_(-most, most)  # otherwise infinite
    if values is not gradient:
        gradient.copy_(values)


def _stats(logits: Tensor, index: Tensor, mine: Tensor) -> Tensor:
    """Return [N, 2] fp32: log-sum-exp, and the target's logit or 0. Without columns, these are -inf and 0."""
    if logits.shape[1] == 0:
        stats = logits.new_zeros(len(logits), 2, dtype=torch.float32)
        stats[:, 0] = -torch.inf
        return stats
    log_sum = torch.cat([torch.logsumexp(x.float(), 1) for (x,) in _cache_sized(logits)])
    return torch.stack([log_sum, logits.gather(1, index).squeeze(1).float() * mine], dim=1)


def _cache_sized(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of rows of each tensor, whose fp32 logits take at most SOFTMAX_BYTES."""
    rows = max(1, SOFTMAX_BYTES[logits.device.type] // (max(1, logits.shape[1]) * 4))
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)
