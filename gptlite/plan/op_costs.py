"""What an op does by the shapes that it is given: its arithmetic, the bytes that it reads and writes, its workspace.

Two FLOPs a multiplication and addition. Causal attention computes half of its scores. An op that is neither a product
nor attention is priced by its bytes; FLOPs of convolutions are torch's (torch.utils.flop_counter).
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gptlite.models.parallelize import is_kept
from gptlite.plan.profile import ATTENTION, MATMUL, MOVE, Op

NOTHING = {  # ops that compute nothing
    *("detach", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "lift_fresh", "device"),
    *("_local_scalar_dense", "resize_", "set_", "_unsafe_view", "_reshape_alias"),
}
LOOKUPS = {"embedding", "index", "gather", "index_select"}  # read of their first argument what they write
WRITES = {"copy_", "zero_", "fill_"}  # do not read what they are called on
SILENT = ("c10d", "_c10d_functional", "prim")
# Which argument is the left factor; the right one follows it.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0, "weight_gradient": 0}
SCORES = {  # and which has the queries; the keys follow them, or are packed with them
    "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
    "attention": 0,
    "attention_backward": 3,
    "attention_packed": 0,
    "attention_packed_backward": 3,
}
ROWS = 256  # at most so many partial sums of each of three columns: gptlite_rows_workspace of kernels/cpu/workspace.cpp
# By our ops with sums over rows: which argument has the rows.
ROWS_OF = {"layer_norm_backward": 1, "residual_norm_backward": 2, "bias_gelu_backward": 1}


def op_of(func: Any, args: Any, out: Any) -> Op | None:
    """A dispatched op; None where it computes nothing."""
    name = func._opname
    if name in NOTHING or func.namespace in SILENT or func.is_view:
        return None
    moved, kept = float(_moved(func, args, out)), is_kept(func)
    if name in PRODUCTS:
        batch, rows, inner, columns = _product(name, *args[PRODUCTS[name] :][:2])
        flops = 2.0 * batch * rows * inner * columns
        return Op(MATMUL, moved, flops, float(rows), float(inner), float(columns), kept)
    if name in SCORES:
        return Op(ATTENTION, moved, float(_attention(name, args)), kept=kept)
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        return Op(ATTENTION, moved, float(formula(*args, out_val=out)), kept=kept)
    return Op(MOVE, moved) if moved else None


def moment_bytes(func: Any, args: Any) -> int:
    """Bytes that a dispatched op takes besides its results while it runs: our kernels' workspaces."""
    if func.namespace != "gptlite" or func._opname not in ROWS_OF:
        return 0
    *leading, width = args[ROWS_OF[func._opname]].shape
    return 4 * 3 * min(prod(leading), ROWS) * width


def _product(name: str, a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Batch, rows, inner dim and columns, of a [*, m, k] b [*, k, n]; of a weight's gradient a [*, m], b [*, n]."""
    if name == "weight_gradient":
        return 1, a.shape[-1], prod(a.shape[:-1]), b.shape[-1]
    return prod(a.shape[:-2]), a.shape[-2], a.shape[-1], b.shape[-1]


def _attention(name: str, args: Any) -> int:
    """FLOPs of two products forward; backward five, for scores are computed again. Ours are causal always."""
    q, *others = args[SCORES[name] :]
    if "packed" in name:  # [B, S, H, 3, D]
        product = 2 * prod(q.shape) // 3 * q.shape[1]
    else:  # [B, H, Sq, D], keys [B, H, Sk, D]
        product = 2 * prod(q.shape) * others[0].shape[-2]
    causal = "flash" not in name or any(each is True for each in others)
    return (5 if name.endswith("backward") else 2) * product // (2 if causal else 1)


def _moved(func: Any, args: Any, out: Any) -> int:
    """Bytes that an op reads, those that it writes into its arguments, and those of new results."""
    name, schema = func._opname, func._schema
    given = zip(schema.arguments, args, strict=False)
    mutated = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    results = out if isinstance(out, list | tuple) else [out]
    new = [value for each, value in zip(schema.returns, results, strict=False) if each.alias_info is None]
    written, read = sum(_bytes([*mutated, *new])), _bytes(args)
    if name in WRITES or name in LOOKUPS:
        read = read[1:]
    return written + sum(read) + (written if name in LOOKUPS else 0)


def _bytes(values: Any) -> list[int]:
    """Of each tensor among some values; what an expanded one repeats counts once."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
    return [min(prod(each.shape) * each.element_size(), each.untyped_storage().nbytes()) for each in tensors]
