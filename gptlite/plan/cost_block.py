"""How long a rank computes on a micro-batch: the matrix products of a block and of the head by their shapes, and the
bytes that pointwise ops read and write between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptlite.models.gpt.config import GPTConfig
from gptlite.plan.cost_device import Device

FULL, SELECTIVE = "full", "selective"


@dataclass(frozen=True)
class Traffic:
    """Elements that a block's pointwise ops read and write for one token, counted in widths.

    `width`: of d_model, whole on each rank of the tensor axis (cut over it with sequence parallelism); the others are
    cut: `heads` of d_model (queries, keys, values, what attention gives), `inner` of d_ff, `scores` of one query's
    scores in all heads, where they are written out. `ops`: how many kernels that is.
    """

    width: float
    heads: float
    inner: float
    scores: float
    ops: int


@dataclass(frozen=True)
class Stack:
    """How a code base runs a block. `causal`: the share of the scores that its attention computes.

    Bytes: `logit` of each logit (softmax, loss and gradient), `gradient` of each parameter after a backward pass,
    `optimizer` of each parameter that the rank updates.
    """

    forward: Traffic
    backward: Traffic
    fused_attention: bool
    causal: float
    logit: float
    gradient: float
    optimizer: float


@dataclass(frozen=True)
class Piece:
    """A micro-batch as a rank sees it: `sequences` of `length`, each layer cut over `tensor` ranks.

    Of sequences that are cut over `context` ranks it has `length` positions, and the keys of all.
    """

    sequences: int
    length: int
    tensor: int = 1
    sequence: bool = False
    context: int = 1

    @property
    def keys(self) -> int:
        """Positions that queries look at, before the causal mask."""
        return self.length * self.context

    @property
    def tokens(self) -> int:
        """Positions in it."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Passes:
    """Seconds of a micro-batch's forward and backward pass; recomputation is part of the backward one."""

    forward: float
    backward: float

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: float) -> Passes:
        """That of `count` blocks."""
        return Passes(self.forward * count, self.backward * count)


def block(
    model: GPTConfig, piece: Piece, stack: Stack, device: Device, recompute: str = "none", pointwise: bool = True
) -> Passes:
    """One block. `recompute`: what the backward pass computes again: "none", "full" or "selective", all but the
    products; `pointwise: False` leaves out what is not a product (an ablation)."""
    dense, (attend, unattend) = _dense(model, piece, device), _attention(model, piece, stack, device)
    there, back = (_pointwise(model, piece, its, device) for its in (stack.forward, stack.backward))
    if not pointwise:
        there = back = 0.0
    again = {FULL: dense + attend + there, SELECTIVE: there + (0.0 if stack.fused_attention else attend)}
    return Passes(dense + attend + there, 2 * dense + unattend + back + again.get(recompute, 0.0))


def head(model: GPTConfig, piece: Piece, stack: Stack, device: Device, pointwise: bool = True) -> Passes:
    """The output matrix and the loss."""
    rows = -(-model.padded_vocab_size // piece.tensor)
    product = device.matmul(piece.tokens, model.d_model, rows)
    written = device.move(piece.tokens * rows * stack.logit, 10) if pointwise else 0.0
    return Passes(product + written / 2, 2 * product + written / 2)


def block_parameters(model: GPTConfig, tensor: int = 1) -> float:
    """Parameters of a block that a rank of the tensor axis holds."""
    width, inner = model.d_model, model.ffn_size
    biases = (3 * width + inner) / tensor + 2 * width if model.bias else 0
    return (4 * width * width + 2 * width * inner) / tensor + biases + (4 if model.bias else 2) * width


def _dense(model: GPTConfig, piece: Piece, device: Device) -> float:
    """The four linear layers, forward. The gradients of input and weight are products of the same three dims."""
    width, cut, inner = model.d_model, model.d_model // piece.tensor, model.ffn_size // piece.tensor
    shapes = ((width, 3 * cut), (cut, width), (width, inner), (inner, width))
    return sum(device.matmul(piece.tokens, *shape) for shape in shapes)


def _attention(model: GPTConfig, piece: Piece, stack: Stack, device: Device) -> tuple[float, float]:
    """Forward and backward."""
    heads, length, wide = model.num_heads / piece.tensor, piece.length, model.head_dim
    batch = piece.sequences * heads
    if stack.fused_attention:
        flops, elements = 4 * batch * length * piece.keys * wide * stack.causal, 4 * batch * length * wide
        # The backward pass has five products for two, the scores' again among them.
        return device.fused_attention(flops, elements), device.fused_attention(2.5 * flops, 2 * elements)
    product = device.matmul(length, wide, piece.keys * stack.causal, batch)
    return 2 * product, 4 * product


def _pointwise(model: GPTConfig, piece: Piece, traffic: Traffic, device: Device) -> float:
    ranks = piece.tensor
    each = traffic.width * model.d_model / (ranks if piece.sequence else 1)
    each += (traffic.heads * model.d_model + traffic.inner * model.ffn_size) / ranks
    each += traffic.scores * model.num_heads * piece.keys / ranks
    return device.move(piece.tokens * each * device.itemsize, traffic.ops)
