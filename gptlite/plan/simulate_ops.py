"""What an op does by the shapes that it is given: its arithmetic, and the bytes that it reads and writes.

Two FLOPs a multiplication and addition. Causal attention computes half of its scores. An op that is neither a product
nor attention is priced by its bytes; FLOPs of convolutions are torch's (torch.utils.flop_counter).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from torch import Tensor
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


def op_of(func: Any, args: Any, out: Any) -> Op | None:
    """A dispatched op; None where it computes nothing."""
    name = func._opname
    if name in NOTHING or func.namespace in SILENT or func.is_view:
        return None
    moved, kept = float(_moved(func, args, out)), is_kept(func)
    if name in PRODUCTS:
        batch, rows, inner, columns = PRODUCTS[name](*args)
        flops = 2.0 * batch * rows * inner * columns
        return Op(MATMUL, moved, flops, float(rows), float(inner), float(columns), kept)
    if name in SCORES:
        return Op(ATTENTION, moved, float(SCORES[name](*args)), kept=kept)
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        return Op(ATTENTION, moved, float(formula(*args, out_val=out)), kept=kept)
    return Op(MOVE, moved) if moved else None


def _moved(func: Any, args: Any, out: Any) -> int:
    """Bytes that an op reads, those that it writes into its arguments, and those of new results."""
    name, schema = func._opname, func._schema
    given = zip(schema.arguments, args, strict=False)
    mutated = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
    results = out if isinstance(out, list | tuple) else [out]
    new = [value for each, value in zip(schema.returns, results, strict=False) if each.alias_info is None]
    written = sum(map(_bytes, _tensors([*mutated, *new])))
    read = list(_tensors(args))
    if name in WRITES or name in LOOKUPS:
        read = read[1:]
    return written + sum(map(_bytes, read)) + (written if name in LOOKUPS else 0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes(tensor: Tensor) -> int:
    """Of what an expanded tensor repeats, each once."""
    return min(prod(tensor.shape) * tensor.element_size(), tensor.untyped_storage().nbytes())


def _mm(a: Any, b: Any, *_: Any) -> tuple[int, int, int, int]:
    """a [m, k] b [k, n]."""
    return 1, a.shape[0], a.shape[1], b.shape[1]


def _bmm(a: Any, b: Any, *_: Any) -> tuple[int, int, int, int]:
    """a [batch, m, k] b [batch, k, n]."""
    return a.shape[0], a.shape[1], a.shape[2], b.shape[2]


PRODUCTS: dict[str, Callable[..., tuple[int, int, int, int]]] = {
    "mm": _mm,
    "bmm": _bmm,
    "addmm": lambda _, a, b, *__: _mm(a, b),
    "baddbmm": lambda _, a, b, *__: _bmm(a, b),
    "_scaled_mm": _mm,
    "weight_gradient": lambda grad, x, *_: (1, grad.shape[-1], prod(grad.shape[:-1]), x.shape[-1]),
}


def _sdpa(q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, *_: Any) -> int:
    """q [B, H, Sq, D], k [B, H, Sk, D]: scores, and what they weigh."""
    return 4 * prod(q.shape) * k.shape[-2] // (2 if causal else 1)


def _sdpa_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, p: float, causal: bool, *_: Any) -> int:
    """Scores again, and two products for each of the forward pass's two."""
    return 5 * _sdpa(q, k, v, p, causal) // 2


def _attention(q: Any, k: Any, *_: Any) -> int:
    return _sdpa(q, k, k, causal=True)


def _attention_backward(grad: Any, out: Any, lse: Any, q: Any, k: Any, *_: Any) -> int:
    return 5 * _attention(q, k) // 2


def _packed(qkv: Any, *_: Any) -> int:
    """qkv [B, S, H, 3, D]."""
    return 4 * prod(qkv.shape) // 3 * qkv.shape[1] // 2


def _packed_backward(grad: Any, out: Any, lse: Any, qkv: Any, *_: Any) -> int:
    return 5 * _packed(qkv) // 2


SCORES: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_packed": _packed,
    "attention_packed_backward": _packed_backward,
}
