"""What the parts of the model take of memory while they run, beside model state: bytes allocated and given back.

A tape is a list of bytes in the order of events, negative where memory is given back, as the ops and torch's autograd
do it: each module's forward pass, and its backward pass. What a forward tape leaves is what autograd keeps. Found by
reading allocation events (see docs/planner_memory.md); tests hold it to them. No torch here.

Shapes: B sequences, S positions, d features, T tensor-parallel ranks. Selective recomputation: Korthikanti et al. 2022,
arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from gptlite.models.gpt.config import Activation
from gptlite.ops.config import QUERY_BLOCK, Attention
from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.parallelism.layout import splits_backward
from gptlite.plan.parameters import fused
from gptlite.plan.workload import Workload

MASTER = 4  # bytes of a number in fp32
INDEX = 8  # of an int64
PARTS = 256  # rows of partial sums that a kernel with sums over rows writes, three of them (kernels/cpu/workspace.cpp)

Tape = list[int]


def most(tape: Iterable[int]) -> int:
    """The most bytes at once, of those that a tape allocates."""
    return max(accumulate(tape, initial=0))


@dataclass(frozen=True)
class Sizes:
    """Bytes of one micro-batch's tensors on a rank; weights' are those of their gradients in `grad` bytes a number.

    whole: [B, S, d]; slice: the same as it is between layers; heads: a rank's part of one of queries, keys, values;
    gathered: keys and values of all ranks that share sequences, `refill`: given back after the forward pass; inner: of
    the MLP's hidden layer; scores: [B, H, S, S]; row: one fp32 number a position between layers.
    """

    whole: int
    slice: int
    heads: int
    gathered: int
    refill: bool
    inner: int
    scores: int
    lse: int
    row: int
    item: int
    tokens: int
    rows: int
    width: int
    inner_width: int
    tensor: int
    sequence: bool
    dropout: bool
    fused: bool
    attention: Attention
    bias: bool
    relu: bool
    length: int
    overlap: bool
    casts: bool  # layers cast fp32 weights, where no FSDP2 does
    more: int  # kept by a block in fp32 where Apex's levels compute so: inputs of norms (O2), of GELU (O1)
    grad: int
    added: bool  # gradients come on top of earlier ones: else the first ones are model state from the beginning
    holds: bool  # FSDP2 holds a block's gradients until it reduces them, else each is added to what there is and freed
    device: str

    @classmethod
    def of(cls, work: Workload) -> Sizes:
        """Of a step."""
        model, config, item = work.model, work.parallelism, work.itemsize
        tensor, sharded = work.layout.size("tp"), work.sharded
        tokens, context = work.rank_tokens, work.layout.context
        # Of chunks c of 2 C, an early one and a late one, queries see (2 C + 1) c keys together.
        seen = work.sequence_length if context == 1 else (work.sequence_length + work.rank_length // 2) // 2
        rows = tokens // tensor if config.sequence else tokens
        split = splits_backward(config)
        held = work.gather_item if sharded else work.stored  # bytes of a parameter that a layer is given
        half_grads = sharded and held < work.reduce_item  # FSDP2 accumulates in fp32 what is computed in 16 bits
        return cls(
            whole=tokens * model.d_model * item,
            slice=rows * model.d_model * work.stream_item,
            heads=tokens * model.d_model * item // tensor,
            gathered=2 * tokens * context * model.d_model * item // tensor if context > 1 else 0,
            refill=config.activation_checkpointing is ActivationCheckpointing.none,
            inner=tokens * model.ffn_size * item // tensor,
            scores=tokens * seen * model.num_heads // tensor * item,
            lse=tokens * model.num_heads // tensor * MASTER,
            row=rows * MASTER,
            item=item,
            tokens=tokens,
            rows=rows,
            width=model.d_model,
            inner_width=model.ffn_size // tensor,
            tensor=tensor,
            sequence=config.sequence,
            dropout=model.dropout > 0,
            fused=fused(work),
            attention=work.attention,
            bias=model.bias,
            relu=model.activation is Activation.relu,
            length=work.sequence_length,
            overlap=tensor > 1 and not split,
            casts=item < held,
            more={"o1": tokens * model.ffn_size // tensor, "o2": 2 * rows * model.d_model}.get(work.amp, 0)
            * (MASTER - item),
            grad=held if sharded else item,
            added=sharded or work.micro_batches > 1 or item < MASTER,
            holds=sharded and (config.zero >= 2 or work.micro_batches == 1 or half_grads),
            device=work.device,
        )

    def workspace(self, rows: int, width: int) -> int:
        """What a kernel with sums over rows takes."""
        return 3 * min(rows, PARTS) * width * MASTER if self.fused else 0

    def weight(self, elements: int, bias: int = 0) -> Tape:
        """The gradients of a matrix and a bias, as they come."""
        if not self.added:
            return []
        grads = [elements * self.grad] + [bias * self.grad] * (self.bias and bias > 0)
        return grads if self.holds else [*grads, *(-each for each in grads)]

    def cast(self, elements: int) -> Tape:
        """A weight that a layer has cast."""
        return [elements * self.item] if self.casts else []


def block_forward(s: Sizes) -> Tape:
    """x is there, and is counted as what came before made it."""
    matrix = s.width * s.width // s.tensor
    tape = [s.more, *s.cast(2 * s.width), s.slice, s.row, s.row]  # the norm, and its statistics
    tape += s.cast(3 * matrix) + _column(s, 3 * s.heads, biased=True)
    tape += _gathered_forward(s) if s.gathered else _attention_forward(s)
    tape += s.cast(matrix) + _row(s)
    if s.fused:
        tape += [s.slice, s.slice, s.row, s.row]  # norm and sum
    else:
        dropped = [s.slice, -s.slice] if s.dropout else []
        tape += [*masked(s, s.slice), *dropped, s.slice, s.slice, s.row, s.row]
    inner = s.inner_width
    tape += s.cast(s.width * inner) + _column(s, s.inner, biased=not s.fused and s.bias)
    tape += [*s.cast(inner), s.inner]  # GELU
    tape += s.cast(s.width * inner) + _row(s)
    if s.dropout:
        tape += [*masked(s, s.slice), s.slice, -s.slice]
    # The residual sum; then the MLP's output and attention's are given back.
    return [*tape, s.slice, -s.slice, -s.slice]


def _column(s: Sizes, out: int, biased: bool) -> Tape:
    """A column-parallel layer, its input gathered for a moment, or where the backward pass does not gather it again
    for as long as the layer's activations are kept."""
    if s.tensor == 1:
        return [out]
    tape = [s.whole, s.whole, -s.whole] if s.sequence else []
    tape += [out]
    if s.sequence and s.overlap:
        tape += [-s.whole]
    return [*tape, *([out, -out] if biased and s.bias else [])]


def _row(s: Sizes) -> Tape:
    """A row-parallel layer, whose output is summed over the ranks."""
    if s.tensor == 1:
        return [s.slice]
    tape = [s.whole, s.whole]
    tape += [s.slice, -s.whole, -s.whole] if s.sequence else [-s.whole]
    tape += [s.slice, -s.slice] if s.bias else []
    # What the column-parallel layer before it was given whole is no longer wanted cut.
    return [*tape, -s.slice] if s.sequence and not s.overlap else tape


def _attention_forward(s: Sizes) -> Tape:
    h, c = s.heads, s.scores
    future = s.length * s.length
    if s.dropout or s.attention is Attention.fused_softmax:
        copies = [h, h, c]  # of queries and keys; the scores
        if s.fused:
            tape = [*copies, c, *([c] if s.dropout else []), h, h, -c, h, -3 * h, -h]
        else:
            # fp32 scores scaled, masked, those of empty rows masked; what the softmax gives, masked again
            tape = [*copies, future, c, -c, c, -c, c // s.length, c, -c, *masked(s, c), c, -c, c, h, h, h, -3 * h, -h]
        return tape
    if s.attention is Attention.matmul:
        kept = s.length <= QUERY_BLOCK
        block = min(s.length, QUERY_BLOCK)
        part = c * block // s.length
        bias = block * s.length * (s.item + 1)
        probabilities = [bias, part, part, -part, -bias, h * block // s.length, -h * block // s.length]
        return [h, h, h, h, *probabilities, *([] if kept else [-part]), h, -3 * h, -h]
    return [h, s.lse]


def _gathered_forward(s: Sizes) -> Tape:
    """Attention of a rank's two chunks, to the keys and values of all."""
    h, g = s.heads, s.gathered
    tape = [g, 2 * h, g, g, -g, -g, -2 * h]  # in order, its own side by side, all ranks', and gloo's
    chunk = [(each + (each > 0)) // 2 for each in _attention_forward(s)]
    return [*tape, *chunk, *chunk, h, *([-g] if s.refill else [])]


def _gathered_backward(s: Sizes) -> Tape:
    """The gradients of what all ranks have are put together, summed and cut."""
    h, g = s.heads, s.gathered
    own = [*([g, 2 * h, g, g, -g, -g, -2 * h] if s.refill else [])]
    # Those of queries, and of the keys and values that each of the two chunks sees: (2 C + 1) / 2 C of all together.
    seen = g + 2 * h // 2
    return [-h, *own, h, seen, h, -h - s.lse, -g, g, g, 2 * h, -g, -seen, 3 * h, -2 * h - g, -3 * h, -h]


def masked(s: Sizes, size: int) -> Tape:
    """A dropout mask of so many bytes of numbers, where no kernel draws it again: a byte an element, kept."""
    if s.fused:
        return []
    elements = size // s.item
    return [10 * 2 * elements, elements, -10 * 2 * elements]  # counters and products in int64, a quarter as many


def block_backward(s: Sizes, given: bool = True) -> Tape:
    """The gradient of the block's output is there, and counted only if `given` by a module of this rank."""
    inner = s.inner_width
    gelu_workspace = s.workspace(s.tokens, inner)
    norm_workspace = s.workspace(s.rows, s.width)
    dropping = s.slice if s.dropout else 0
    tape: Tape = [dropping] if dropping else []
    # Down: its input's gradient, its own; then its input is free.
    tape += [s.whole, s.whole, -s.whole] if s.sequence else []
    tape += [s.inner, *s.weight(s.width * inner, s.width), *_uncast(s, s.width * inner)]
    tape += [-s.whole] if s.sequence else []
    tape += [-dropping, -s.inner]
    if not s.fused and s.dropout:
        tape += [-(s.slice // s.item)]
    bias = inner * s.grad if s.bias else 0
    tape += [s.inner, bias, gelu_workspace, -gelu_workspace, -s.inner, -s.inner] + ([] if s.holds else [-bias])
    tape += _uncast(s, inner)
    tape += _column_backward(s, s.inner, s.width * inner)
    # The norm: of the residual's gradient and the norm's comes one for both, two where the residual was dropped out.
    tape += [*([dropping] if s.fused else []), s.slice, norm_workspace, -norm_workspace, -s.slice]
    tape += [-s.slice if given else 0, -s.slice, -2 * s.row]
    if not s.fused and s.dropout:
        tape += [s.slice, -(s.slice // s.item)]
    matrix = s.width * s.width // s.tensor
    tape += [s.whole, s.whole, -s.whole] if s.sequence else []
    tape += [s.heads, *s.weight(matrix, s.width), *_uncast(s, matrix)]
    tape += [-s.whole] if s.sequence else []
    tape += [-dropping]
    tape += _gathered_backward(s) if s.gathered else _attention_backward(s)
    tape += _column_backward(s, 3 * s.heads, 3 * matrix, 3 * s.width // s.tensor)
    tape += [
        s.slice,
        norm_workspace,
        -norm_workspace,
        -s.slice,
        -s.slice,
        -2 * s.row,
        -s.slice,
        *_uncast(s, 2 * s.width),
        -s.more,
    ]
    return tape


def _uncast(s: Sizes, elements: int) -> Tape:
    return [-each for each in s.cast(elements)]


def _column_backward(s: Sizes, grad: int, elements: int, bias: int = 0) -> Tape:
    """From a gradient of the output, given back, to that of the input, which is given back with its own input."""
    weight = [*s.weight(elements, bias), *_uncast(s, elements)]
    if s.tensor == 1:
        return [s.slice, *weight, -grad, -s.slice]
    if not s.overlap:
        tape = [s.whole, *weight, -grad]
        tape += [s.whole, s.slice, -s.whole, -s.whole] if s.sequence else [s.whole, -s.whole]
        return [*tape, -s.slice]
    if not s.sequence:
        return [s.whole, *weight, -grad, -s.slice]
    return [s.whole, s.whole, s.whole, s.slice, s.whole, *weight, -4 * s.whole, -grad, -s.slice]


def _attention_backward(s: Sizes) -> Tape:
    """From the gradient of what the projection was given to that of queries, keys and values."""
    h, c = s.heads, s.scores
    if s.dropout or s.attention is Attention.fused_softmax:
        dropped = 1 if s.dropout else 0
        # What went into the last product, its gradients; through dropout and softmax; then queries' and keys'.
        tape = [-h, c, h, -h, *([-c] * dropped), *([c, -c] * dropped), c, -c, -c, h, h, -c, -h, -h]
        tape += [] if s.fused else [-(c // s.item), -(c // s.length), -s.length * s.length]
        return [*tape, 3 * h, -3 * h, -h]
    if s.attention is Attention.matmul:
        kept = s.length <= QUERY_BLOCK
        part = c * min(s.length, QUERY_BLOCK) // s.length
        tape = [-h, h, h, h, h, -h, part, part, -part, h, -h, h, -h]
        return [
            *tape,
            -part,
            *([-part] if kept else []),
            -h,
            -h,
            -h,
            -h,
            3 * h,
            -3 * h,
            3 * h - 3 * h,
        ]
    if s.attention is Attention.fused:
        return [3 * h, -h, -h, -s.lse, -3 * h]
    return [h, h, h, -h, -h, -s.lse, 3 * h, -3 * h, -3 * h]  # of each, then side by side as the projection made them


def block_inputs(s: Sizes) -> Tape:
    """The half of a block's backward pass that computes its input's gradient: what is kept stays, and so do the
    gradients that the other half begins with."""
    dropped = [s.slice] if s.dropout else []
    gathered = [s.whole, s.whole, -s.whole] if s.sequence else []
    gelu, norm = s.workspace(s.tokens, s.inner_width), s.workspace(s.rows, s.width)
    summed = [s.whole, s.whole, -s.whole] if s.tensor > 1 and not s.sequence else []
    if s.sequence:
        summed = [s.whole, s.whole, s.slice, -s.whole, -s.whole]
    entered = [*summed, *([-s.whole + s.slice] if summed and not s.sequence else [])] or [s.slice]
    tape = [*dropped, *gathered, s.inner, s.inner, gelu, -gelu, *entered]
    tape += [*dropped, s.slice, norm, -norm, *gathered, s.heads, *_attention_inputs(s), *entered]
    return [*tape, s.slice, norm, -norm, -s.slice]


def _attention_inputs(s: Sizes) -> Tape:
    """From the gradient of what the projection was given to that of queries, keys and values; all is kept."""
    h, c = s.heads, s.scores
    if s.dropout or s.attention in (Attention.fused_softmax, Attention.matmul):
        return [c, h, c, -c, c, -c, h, h, -c, -3 * h, 3 * h, -h]
    return [3 * h, -h] if s.attention is Attention.fused else [3 * h, 3 * h, -3 * h, -h]


def full_backward(s: Sizes, given: bool = True) -> Tape:
    """A block that kept only its input: its forward pass up to the last tensor wanted, then its backward pass."""
    made = sum(block_forward(s)) - s.slice
    return [made + s.slice, -s.slice, *block_backward(s, given)]


def recomputed_forward(s: Sizes, selective: bool) -> Tape:
    """A block whose activations are computed again: its output stays, and what is kept of its products."""
    passing = 4 * s.slice + 2 * s.inner
    kept = products(s) if selective else 0
    return [kept, passing - min(kept, passing), min(kept, passing) - passing, s.slice]


def products(s: Sizes) -> int:
    """What selective recomputation keeps of a block beside its output: its products, and attention's by one kernel."""
    kernel = not s.dropout and s.attention not in (Attention.matmul, Attention.fused_softmax)
    return 3 * s.heads + (s.heads + s.lse if kernel else 0) + 2 * _product(s) + s.inner


def _product(s: Sizes) -> int:
    return s.slice if s.tensor == 1 else s.whole


def selective_backward(s: Sizes, given: bool = True) -> Tape:
    """A block that kept its products: all else again, then its backward pass. The projection's product is given back
    once it is used, the MLP's at the end."""
    made = sum(block_forward(s)) - s.slice + 2 * _product(s) - products(s)
    return [made, -_product(s), *block_backward(s, given), -_product(s)]
