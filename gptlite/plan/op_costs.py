"""Cost of an op by the shapes of its arguments: arithmetic, bytes read and written, workspace.

A multiplication with an addition counts as two FLOPs. Causal attention computes half of its scores. An op that is
neither a product nor attention costs its bytes; FLOPs of convolutions come from torch.utils.flop_counter.
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
LOOKUPS = {"embedding", "index", "gather", "index_select"}  # read as much of their first argument as they write
WRITES = {"copy_", "zero_", "fill_"}  # overwrite their first argument without reading it
SILENT = ("c10d", "_c10d_functional", "prim")
# Index of the left factor among the arguments; the right one follows it.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0, "weight_gradient": 0}
SCORES = {  # index of the queries; the keys follow them, or are packed with them
    "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
    "attention": 0,
    "attention_backward": 3,
    "attention_packed": 0,
    "attention_packed_backward": 3,
}
ROWS = 256  # limit of partial sums for each of three columns, see gptlite_rows_workspace in kernels/cpu/workspace.cpp
# Our ops that sum over rows: index of the argument with the rows.
ROWS_OF = {"layer_norm_backward": 1, "residual_norm_backward": 2, "bias_gelu_backward": 1}


def op_of(func: Any, args: Any, out: Any) -> Op | None:
    """Return the cost of a dispatched op; None if it computes nothing."""
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
    """Return the temporary bytes of a dispatched op beside its results: the workspaces of our kernels."""
    if func.namespace != "gptlite" or func._opname not in ROWS_OF:
        return 0
    *leading, width = args[ROWS_OF[func._opname]].shape
    return 4 * 3 * min(prod(leading), ROWS) * width


def _product(name: str, a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Return batch, rows, inner dim and columns of a [*, m, k] b [*, k, n]; of a weight's gradient, a [*, m], b [*,
    n]."""
    if name == "weight_gradient":
        return 1, a.shape[-1], prod(a.shape[:-1]), b.shape[-1]
    return prod(a.shape[:-2]), a.shape[-2], a.shape[-1], b.shape[-1]


def _attention(name: str, args: Any) -> int:
    """Return the FLOPs of attention: two products forward, five backward, which computes the scores again. Ours is
    causal."""
    q, *others = args[SCORES[name] :]
    if "packed" in name:  # [B, S, H, 3, D]
        product = 2 * prod(q.shape) // 3 * q.shape[1]
    else:  # [B, H, Sq, D], keys [B, H, Sk, D]
        product = 2 * prod(q.shape) * others[0].shape[-2]
    causal = "flash" not in name or any(each is True for each in others)
    return (5 if name.endswith("backward") else 2) * product // (2 if causal else 1)


def _moved(func: Any, args: Any, out: Any) -> int:
    """Return the bytes that an op reads, writes into its arguments, and writes into new results."""
    name, schema = func._opname, func._schema
    given = zip(schema.arguments, args, strict=False)
    mutated = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    results = out if isinstance(out, list | tuple) else [out]
    new = [value for each, value in zip(schema.returns, results, strict=False) if each.alias_info is None]
    written, read = sum(_bytes([*mutated, *new])), _bytes(args)
    if name in WRITES or name in LOOKUPS:
        read = read[1:]  # a write reads nothing of its target, a lookup only the rows that it copies
    return written + sum(read) + (written if name in LOOKUPS else 0)


def _bytes(values: Any) -> list[int]:
    """Return the bytes of each tensor among `values`; repetitions of an expanded tensor count once."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
    return [min(prod(each.shape) * each.element_size(), each.untyped_storage().nbytes()) for each in tensors]
