"""Mutations of collectives: over the wrong axis, left out, doubled, scaled, or forgotten by a rank.

`MUTATIONS`: the layout each is planted in, and what is patched there. Types find all but those in `UNSEEN`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from distributed.cells import experts as moe
from distributed.cells.layouts import Cell
from torch import Tensor

from certify.types.faults import Patch
from gptlite.models import experts, parallel_layers
from gptlite.parallelism import collectives, context, expert, tensor
from gptlite.trainer import step

TENSOR = Cell(tensor=2, data=2, accumulation=2)
SLICED = replace(TENSOR, sequence=True)
SPLIT = Cell(tensor=2, pipeline=2, schedule="zero_bubble", accumulation=4, sequence=True)  # no layer overlaps
CONTEXT = Cell(context=2, data=2, accumulation=2)
EXPERT = Cell(data=4, zero=2, accumulation=2, shared=moe.BIAS, more=("parallelism.expert=2",))
EXPERTS = replace(EXPERT, tensor=2, data=2)
LOSSES = Cell(tensor=2, context=2, data=1, sequence=True, shared=moe.LOSSES)
GROUPED = Cell(tensor=2, shared=("model.num_heads=8", "model.kv_heads=1"))

_sum, _reduce_scatter = tensor._sum, context.reduce_scatter_single
_groups = experts.Router._sequence_groups


def _over_the_world(x: Tensor, axis: Any) -> Tensor:
    dist.all_reduce(x)
    return x


def _reduced(operator: Any) -> Any:
    def run(x: Tensor, axis: Any) -> Tensor:
        dist.all_reduce(x, operator, group=axis.group)
        return x

    return run


def _own_slice(x: Tensor, axis: Any) -> tuple[Tensor, None]:
    batch, length, width = x.shape
    return x.view(batch, axis.size, length // axis.size, width)[:, axis.rank].contiguous(), None


def _own_copies(x: Tensor, axis: Any, wait: bool = False) -> tuple[Tensor, None]:
    return x.unsqueeze(0).expand(axis.size, *x.shape).contiguous(), None


def _overlapped(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


def _scattered_and_summed(out: Tensor, given: Tensor, group: Any) -> None:
    _reduce_scatter(out, given, group=group)
    dist.all_reduce(out, group=group)


def _no_rows(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad.new_zeros(sum(ctx.sent), grad.shape[1]), None, None, None, None


def _no_columns(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad.new_zeros(*grad.shape[:-1], ctx.width), None, None, None


def _counted_by_all(value: Tensor, mesh: Any, axes: Any = None, op: str = "sum") -> Tensor:
    return collectives.all_reduce(value, mesh, None, op)


def _counted_over_tensor(value: Tensor, mesh: Any, axes: Any = None, op: str = "sum") -> Tensor:
    if value.dtype == torch.int64 and axes:
        dist.all_reduce(value, group=mesh.group("tp"))
    return collectives.all_reduce(value, mesh, axes, op)


def _totals_left_out(value: Tensor, mesh: Any, axes: Any = None, op: str = "sum") -> Tensor:
    return value if mesh.rank == 0 and axes is None else collectives.all_reduce(value, mesh, axes, op)


MUTATIONS: dict[str, tuple[Cell, tuple[Patch, ...]]] = {
    "a sum over the world": (TENSOR, ((tensor, "_sum", _over_the_world),)),
    "a sum taken twice": (TENSOR, ((tensor, "_sum", lambda x, axis: _sum(_sum(x, axis), axis)),)),
    "a sum times the degree": (TENSOR, ((tensor, "_sum", lambda x, axis: _sum(x, axis).mul_(axis.size)),)),
    "a mean": (TENSOR, ((tensor, "_sum", _reduced(dist.ReduceOp.AVG)),)),
    "a maximum": (TENSOR, ((tensor, "_sum", _reduced(dist.ReduceOp.MAX)),)),
    "a sum that one rank forgets": (
        TENSOR,
        ((tensor, "_sum", lambda x, axis: x if axis.rank else _sum(x, axis)),),
    ),
    "a slice of the own part": (SLICED, ((tensor, "_scatter", _own_slice),)),
    "copies of the own slice": (SLICED, ((tensor, "_gather", _own_copies),)),
    "copies of the own slice, without overlap": (SPLIT, ((tensor, "_gather", _own_copies),)),
    "a gradient's slice of the own part": (
        SPLIT,
        ((tensor._Gather, "backward", staticmethod(lambda ctx, grad: (_own_slice(grad, ctx.axis)[0], None))),),
    ),
    "no sum while the weight's gradient is computed": (
        TENSOR,
        ((tensor._OverlappedColumn, "backward", staticmethod(_overlapped)),),
    ),
    "gradients of keys summed twice": (CONTEXT, ((context, "reduce_scatter_single", _scattered_and_summed),)),
    "keys not gathered": (CONTEXT, ((context, "_fill", lambda whole, qkv, axis: whole.zero_()),)),
    "gradients of rows not returned": (EXPERT, ((expert._Exchange, "backward", staticmethod(_no_rows)),)),
    "gradients of columns not returned": (GROUPED, ((tensor._Columns, "backward", staticmethod(_no_columns)),)),
    "targets counted over the world": (TENSOR, ((step, "all_reduce", _counted_by_all),)),
    "targets counted over the tensor axis too": (TENSOR, ((step, "all_reduce", _counted_over_tensor),)),
    "totals without rank 0": (TENSOR, ((step, "all_reduce", _totals_left_out),)),
    "the head's input not entered": (TENSOR, ((parallel_layers, "enter", lambda x, axis: x),)),
    "the experts' output not summed": (EXPERTS, ((experts, "leave", lambda x, axis: x),)),
    "the experts' input not entered": (EXPERTS, ((experts, "enter", lambda x, axis: x),)),
    "every gradient in the norm of every rank": (TENSOR, ((step, "_counts", lambda *_: True),)),
    "losses counted by every rank": (TENSOR, ((step.Mesh, "is_first", lambda self, kind: True),)),
    "the router's counts summed twice": (
        LOSSES,
        ((experts.Router, "_sequence_groups", lambda self: _groups(self) * 2),),
    ),
    "the router's counts of a slice": (LOSSES, ((experts.Router, "_sequence_groups", lambda self: []),)),
}
UNSEEN = {"the router's counts of a slice"}
