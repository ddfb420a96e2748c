"""Lower bound of a traced step's time on an H200: launches, bytes and FLOPs of each op, at the rates stated here.

No rate exceeds a ceiling that was measured on such a GPU: a copy moves 4.3 TB/s (reads plus writes), and a bf16
product of 8192 cubed runs at 790 TFLOP/s. Ops that are not known to be slower run at the ceiling, so the sum is a lower
bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.utils import flop_counter

from gptlite.torch_private.recording import TO_COPY, op_name

from .step_trace import Op, Trace

COPY, PRODUCT = 4.3e12, 790e12  # bytes and FLOPs a second
FP8_PRODUCT = 1388e12  # the fastest product measured for the blocks of GPT-3 XL; the slowest runs at 1,086 TFLOP/s
# FLOP/s of causal attention, forward and backward together, by head width. They are derived from published kernels:
# FlashAttention 2 and 3 take 617 and 394 ns per token for 12 layers of 12 heads of 64 over 2048 positions, and 2662
# and 1557 ns for 24 layers of 16 heads of 128.
ATTENTION = {"FA3": {64: 335e12, 128: 452e12}, "FA2": {64: 214e12, 128: 265e12}}
# Slowdown of products with rows that are not aligned to 16 bytes: cuBLAS cannot use its fast kernels. An audit
# estimated 700 to 1000 ns per token for the LM head's products. 340 ns are possible: 2.1 to 2.9 times less.
MISALIGNED = 2.5
ALIGNED = 16  # bytes
# Target fractions of the copy bandwidth; 1 for all other kernels. Norms are narrow below a width of NARROW.
NARROW, NORM_NARROW, NORM_WIDE, NORM_BACKWARD, LOSS = 1024, 0.88, 0.97, 0.88, 0.98

CLASSES = (
    *("GEMM block", "GEMM head", "attention", "dQKV copy", "norm + residual", "activation", "bias sums", "loss"),
    *("copy/cast", "optimizer", "other"),
)
# Tokens a second, by size and precision.
GOALS = {("small", "bf16"): 590e3, ("small", "bf16+head"): 650e3, ("xl", "bf16"): 77e3, ("xl", "fp8+head"): 92e3}

PRODUCTS: dict[str, Callable[..., int]] = {
    "aten.mm": flop_counter.mm_flop,
    "aten.addmm": flop_counter.addmm_flop,
    "aten.addmm_": flop_counter.addmm_flop,
    "aten.bmm": flop_counter.bmm_flop,
    "aten.baddbmm": flop_counter.baddbmm_flop,
    "aten._scaled_mm": lambda a, b, *_: flop_counter.mm_flop(a, b),
}
COPIES = ("copy_", "clone", op_name(TO_COPY), "cat", "stack", "slice_backward", "contiguous", "zero_", "fill_", "zeros")
WRITE_ONLY = ("copy_", "zero_", "fill_")
OURS = (  # class by the first substring that the op's name contains
    *(("gelu", "activation"), ("activation", "activation"), ("cross_entropy", "loss"), ("adamw", "optimizer")),
    *(("_norm", "norm + residual"), ("join_heads", "dQKV copy")),
    *(("norm", "optimizer"), ("sum", "bias sums")),
)


def _of_lists(length: int, per_chunk: int, extra: int, lists: int) -> Callable[[Op], int]:
    """Return a function that counts the launches of an op on `lists` lists of tensors.

    The op launches `per_chunk` kernels per `length` tensors of a list (rounded up), plus `extra` kernels.
    """
    return lambda op: extra + per_chunk * -(-max(1, len(op.operands) // lists) // length)


# Kernel launches per call. Those of our ops follow the launchers in kernels/cuda. Torch's other ops launch once.
LAUNCHES: dict[str, int | Callable[[Op], int]] = {
    **dict.fromkeys(("gptlite.layer_norm", "gptlite.residual_norm", "gptlite.bias_activation", "gptlite.dropout"), 1),
    **dict.fromkeys(("gptlite.layer_norm_backward", "gptlite.residual_norm_backward"), 2),
    **dict.fromkeys(("gptlite.bias_activation_backward", "gptlite.join_heads"), 2),
    "gptlite.add_token_rows_": 1,
    # One more launch sets the amax to 0.
    **dict.fromkeys(("gptlite.layer_norm_amax", "gptlite.residual_norm_amax", "gptlite.bias_activation_amax"), 2),
    **dict.fromkeys(("gptlite.residual_norm_amax_backward", "gptlite.bias_activation_amax_backward"), 3),
    "gptlite.quantize_fp8": 1,
    **dict.fromkeys(("gptlite.cross_entropy_", "gptlite.cross_entropy_stats", "gptlite.cross_entropy_gradient_"), 1),
    "gptlite.norm": _of_lists(128, per_chunk=1, extra=1, lists=1),
    "gptlite.adamw_": _of_lists(64, per_chunk=2, extra=0, lists=5),
    "aten._scaled_dot_product_flash_attention": 1,
    "aten._scaled_dot_product_flash_attention_backward": 3,  # dy·y, the gradients, and the rounding of dq
    "aten.embedding_dense_backward": 12,  # roughly: the indices are sorted, then segments are summed
    "aten.sort": 8,  # roughly
}


@dataclass
class Row:
    """All calls of one op with the same shapes."""

    group: str
    op: str
    phase: str
    shapes: str
    calls: int = 0
    launches: int = 0
    bytes: int = 0
    flops: int = 0
    ns: float = 0.0  # time of all calls, with FlashAttention 3's rate
    slower_ns: float = 0.0  # the same with FlashAttention 2's rate
    misaligned: int = 0  # calls with operands that are not aligned to 16 bytes


@dataclass
class Model:
    """A step's rows and the quantities derived from them."""

    trace: Trace
    rows: list[Row]

    def by_class(self, slower: bool = False) -> dict[str, float]:
        """Return the ns per token of each class; `slower`: with FlashAttention 2."""
        sums = dict.fromkeys(CLASSES, 0.0)
        for row in self.rows:
            sums[row.group] += (row.slower_ns if slower else row.ns) / self.trace.tokens
        return sums

    def ns_a_token(self, slower: bool = False) -> float:
        """Return the ns per token of the whole step; `slower`: with FlashAttention 2."""
        return sum(self.by_class(slower).values())

    @property
    def launches(self) -> int:
        """Number of kernel launches of a step."""
        return sum(row.launches for row in self.rows)

    @property
    def misaligned(self) -> list[Row]:
        """Products with operands that are not aligned to 16 bytes."""
        return [row for row in self.rows if row.misaligned]

    @property
    def undeclared(self) -> list[str]:
        """Our ops that are missing in LAUNCHES."""
        return sorted({row.op for row in self.rows if row.op.startswith("gptlite.") and row.op not in LAUNCHES})


def model_of_trace(trace: Trace) -> Model:
    """Return the model of a trace. Views, and ops whose tensors are all in host memory, take no time."""
    rows: dict[tuple[str, ...], Row] = {}
    for op in trace.ops:
        if op.view or all(each.host for each in op.tensors):
            continue
        shapes = " ".join("x".join(map(str, each.shape)) or "1" for each in op.operands[:3]) or "-"
        key = (class_of(op, trace), op.name, op.phase, shapes)
        row = rows.setdefault(key, Row(*key))
        launches, moved, flops = LAUNCHES.get(op.name, 1), bytes_of(op), flops_of(op)
        row.calls += 1
        row.launches += launches if isinstance(launches, int) else launches(op)
        row.bytes += moved
        row.flops += flops
        row.misaligned += misaligned(op)
        row.ns += 1e9 * seconds_of(op, trace, moved, flops, "FA3")
        row.slower_ns += 1e9 * seconds_of(op, trace, moved, flops, "FA2")
    return Model(trace, sorted(rows.values(), key=lambda row: -row.ns))


def bytes_of(op: Op) -> int:
    """Return the bytes read and written in device memory; results count once, operands written in place twice."""
    name, results = op.name.partition(".")[2], sum(each.touched for each in op.results)
    if name == "embedding":  # the rows looked up, not the table
        return 2 * results + op.operands[1].touched
    if name == "embedding_dense_backward":  # a table of zeros, and rows added to it
        return 3 * op.operands[0].touched + results
    if name == "add_token_rows_":  # rows of the table, of which each row of dy has one
        table, dy, *places = op.operands
        return dy.touched + 2 * dy.shape[0] * dy.shape[1] * table.item + sum(each.touched for each in places)
    tensors = [each for each in op.tensors if not each.host]
    if name.startswith("cross_entropy") and any(not each.read for each in op.operands):
        return sum(each.touched for each in tensors)  # the logits are read only, since the gradient is elsewhere
    if name in WRITE_ONLY and op.operands[0].written:
        return sum(each.touched for each in tensors)
    return sum(each.touched * (each.read + each.written) for each in tensors)


def flops_of(op: Op) -> int:
    """Return the FLOPs of products and attention, by torch's formulas; half of them for causal attention."""
    shapes: list[Any] = [each.shape for each in op.operands if each.read]
    if op.name in PRODUCTS:
        return int(PRODUCTS[op.name](*shapes))
    if op.name.startswith("aten._scaled_dot_product") and not op.name.endswith("backward"):
        return int(flop_counter.sdpa_flop_count(*shapes[:3])) // (2 if op.causal else 1)
    if op.name.startswith("aten._scaled_dot_product"):
        return int(flop_counter.sdpa_backward_flop_count(*shapes[:4])) // (2 if op.causal else 1)
    return 0


def misaligned(op: Op) -> bool:
    """Return True if an operand or result of a product, in 16 or 8 bits, is not aligned to 16 bytes.

    The rows of a matrix must be aligned, or its columns if it is stored by columns.
    """
    matrices = [(*each.stride[-2:], each.item) for each in op.tensors if len(each.shape) >= 2 and each.item <= 2]
    return op.name in PRODUCTS and any(
        (rows if columns == 1 else columns) * item % ALIGNED for rows, columns, item in matrices
    )


def seconds_of(op: Op, trace: Trace, moved: int, flops: int, attention: str) -> float:
    """Return the lower bound in seconds of a call that moves `moved` bytes. `attention`: FA2 or FA3."""
    if "attention" in op.name and flops:
        return flops / ATTENTION[attention][128 if trace.head_dim >= 128 else 64]
    product = FP8_PRODUCT if op.name == "aten._scaled_mm" else PRODUCT
    seconds = max(moved / (COPY * share_of_copy(op)), flops / product)
    return seconds * MISALIGNED if misaligned(op) else seconds


def share_of_copy(op: Op) -> float:
    """Return the target fraction of the copy bandwidth for one of our kernels, 1 for any other op."""
    if op.name.startswith("gptlite.cross_entropy"):
        return LOSS
    if op.name.startswith(("gptlite.layer_norm", "gptlite.residual_norm")):
        if op.name.endswith("backward"):
            return NORM_BACKWARD
        return NORM_NARROW if op.operands[0].shape[-1] < NARROW else NORM_WIDE
    return 1.0


def class_of(op: Op, trace: Trace) -> str:
    """Return the class of a call, one of CLASSES."""
    space, _, name = op.name.partition(".")
    shapes = [each.shape for each in op.tensors]
    largest = max(shapes, key=prod, default=[])
    vocabulary = trace.vocabulary, -(-trace.vocabulary // 128) * 128  # padded
    table = any(size in vocabulary for shape in shapes for size in shape)
    if op.name in PRODUCTS or "_mm" in name:
        return "GEMM head" if table else "GEMM block"
    if "attention" in name:
        return "attention"
    if space == "gptlite" or "gelu" in name:
        return next((group for part, group in OURS if part in name), "other")
    if "embedding" in name:
        return "other"
    if name in COPIES:
        return "dQKV copy" if len(largest) >= 4 else "copy/cast"
    if table:
        return "copy/cast"  # sums and scalings of the tied table
    if name == "sum" and len(largest) == 2 and trace.tokens in largest:
        return "bias sums"
    if name in ("add", "add_") and trace.width in largest:
        return "norm + residual"
    return "optimizer" if op.phase == "update" else "other"
