"""Bugs of the kinds that parallel training has, to be planted in every rank: the comparison must find each.

A bug is a layout it shows in, what is patched there, and what the comparison must then name first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

from distributed.cells import experts as moe
from distributed.cells.layouts import Cell
from gptlite.data import prepared
from gptlite.data.loader import Loader
from gptlite.models import experts, init, parallelize
from gptlite.models.gpt import attention
from gptlite.models.gpt import model as gpt
from gptlite.ops.inputs import Inputs
from gptlite.parallelism import boxes, collectives, context, expert, pipeline, tensor, zero
from gptlite.parallelism.mesh import Mesh
from gptlite.trainer import build as run_build
from gptlite.trainer import parts as trainer_build
from gptlite.trainer import step
from gptlite.trainer.state import TrainState

Patch = tuple[Any, str, Any]  # an object, its attribute's name, and what is put there
EMBEDDING = "gradient of token_embedding.weight"  # the first tensor of the model, whose gradient has been through all

TENSOR = Cell(tensor=2, accumulation=3)
SEQUENCE = replace(TENSOR, sequence=True)
PIPELINE = Cell(pipeline=2, schedule="1f1b", accumulation=4)
SPLIT = Cell(tensor=2, pipeline=2, schedule="zero_bubble", accumulation=4)  # where no layer overlaps communication
DATA = Cell(data=2, accumulation=3)
ZERO = replace(DATA, zero=3)
HYBRID = Cell(data=4, replicate=2, zero=2, accumulation=3)
CONTEXT = Cell(context=2, accumulation=3)
SHARDED = replace(CONTEXT, zero=3)


@dataclass(frozen=True)
class Bug:
    """`names`: how the first difference begins."""

    cell: Cell
    patches: tuple[Patch, ...]
    names: str = EMBEDDING


@contextmanager
def planted(name: str) -> Iterator[None]:
    """While entered, a bug is in this process; nothing for an empty name."""
    with ExitStack() as stack:
        for where, attribute, wrong in BUGS[name].patches if name else ():
            stack.enter_context(patch.object(where, attribute, wrong))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _not_summed(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return grad, None


def _mirrored(parameter: torch.Tensor) -> boxes.Box:
    """local_box, of the rank at the other end."""
    sizes, starts = boxes.local_box(parameter)
    whole = parameter.shape
    return sizes, tuple(whole[dim] - sizes[dim] - starts[dim] for dim in range(len(whole)))


def _summed_twice(parameters: Any, axis: Any) -> None:
    parameters = list(parameters)
    for _ in range(2):
        _sum_sliced_gradients(parameters, axis)


def _first_slice_key(self: Any, i: int, sample_ids: Any, sites: Any, first: int, gap: int = 0) -> Any:
    return _key(self, i, sample_ids, sites, 0)


def _averaging(*args: Any, scale_grads: bool, **options: Any) -> Any:
    return Schedule1F1B(*args, scale_grads=True, **options)


def _next_samples(self: Any, x: torch.Tensor, targets: torch.Tensor, sample_ids: torch.Tensor) -> Any:
    later = self.part.token_embedding is None
    return self.run(self.part, x, Inputs(targets, sample_ids + later))


def _all_weights(self: TrainState) -> Iterator[Any]:
    for part in self.parts:
        yield from part.parameters()


def _counted_here(value: torch.Tensor, mesh: Any, axes: Any = None, op: str = "sum") -> torch.Tensor:
    return value if value.dtype == torch.int64 else collectives.all_reduce(value, mesh, axes, op)


def _local(value: torch.Tensor, *_: Any) -> torch.Tensor:
    return value


def _own_norm(value: torch.Tensor, mesh: Any, axes: Any = None, op: str = "sum") -> torch.Tensor:
    mine = value[1].clone() if value.ndim else None
    collectives.all_reduce(value, mesh, axes, op)
    if mine is not None:
        value[1] = mine
    return value


def _never_last(part: torch.nn.Module, zero_stage: int, last: bool) -> None:
    zero.before_backward(part, zero=0, last=False)


def _never_all_reduced(self: Any, wanted: bool) -> None:
    _set_requires_all_reduce(self, False)


def _numbered_in_the_rank(self: Loader, consumed_samples: int, micro_index: int) -> Any:
    batch = _batch(self, consumed_samples, micro_index)
    return replace(batch, sample_ids=torch.arange(len(batch.sample_ids)))


def _loader_of_rank_0(*args: Any, **options: Any) -> Loader:
    loader = _build_loader(*args, **options)
    loader._share = replace(loader._share, rank=0)
    return loader


def _as_they_lie(self: Any, first: int, count: int, length: int) -> tuple[int, int]:
    return self.starts(length)[0] + first, 0


def _not_scattered(own: torch.Tensor, ranks: torch.Tensor, group: Any) -> None:
    own.copy_(ranks[dist.get_rank(group)])


def _one_after_the_other(length: int, size: int, rank: int) -> tuple[int, int]:
    return rank * length // size, (2 * rank + 1) * length // (2 * size)


def _in_order_of_ranks(size: int) -> list[tuple[int, int]]:
    return [(rank, half) for half in (0, 1) for rank in range(size)]


def _without(*left_out: str) -> Any:
    return lambda key, **changes: replace(key, **{name: changes[name] for name in changes if name not in left_out})


def _no_gap(self: Any, i: int, sample_ids: Any, sites: Any, first: int, gap: int = 0) -> Any:
    return _key(self, i, sample_ids, sites, first)


def _of_one_data_rank(value: torch.Tensor, mesh: Any, axes: Any = None, op: str = "sum") -> torch.Tensor:
    """What a sum over the data ranks alone would give, those that share its sequences left out."""
    collectives.all_reduce(value, mesh, axes, op)
    return value.floor_divide_(mesh.size("cp")) if value.dtype == torch.int64 else value


def _no_decay_on_later_ranks(config: Any, *others: Any) -> Any:
    return _build_optimizer(replace(config, weight_decay=0.0) if dist.get_rank() else config, *others)


def _own_rows_twice(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    out, *others = _exchange_backward(ctx, grad)
    return out * ctx.axis.size, *others


def _entered_alone(x: torch.Tensor, axis: Any) -> torch.Tensor:
    """`enter` without the sum of the gradients of the router's weights."""
    return x if x.shape[-1] == moe.TOP_K else tensor.enter(x, axis)


def _counted_forward(ctx: Any, weights: Any, losses: Any, chosen: Any, router: Any) -> Any:
    router.load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
    return _count_forward(ctx, weights, losses, chosen, router)


def _without_experts(parameter: torch.Tensor, *whether: bool) -> bool:
    return not tensor.of_experts(parameter) and _counts(parameter, *whether)


def _first_of_all(self: Any, parameters: Any) -> bool:
    return parameters == "all" or _is_first(self, parameters)


def _losses_times(factor: float) -> Any:
    return lambda self, *args: _losses(self, *args) * factor


def _experts_divided_by(factor: float) -> Any:
    """The gradients of modules of experts, divided by a factor."""

    def divide(self: Any, _: float) -> None:
        _divide(self, factor if isinstance(self, expert.ExpertWeights) else 1.0)

    return divide


_is_first, _losses = Mesh.is_first, experts.Router._losses
_divide = zero.FSDPModule.set_gradient_divide_factor
_exchange_backward, _count_forward, _counts = expert._Exchange.backward, experts._Counted.forward, step._counts
_sum_sliced_gradients, _key, _batch = tensor.sum_sliced_gradients, gpt.Block._key, Loader.batch
_set_requires_all_reduce = zero.FSDPModule.set_requires_all_reduce
_build_loader, _build_optimizer = run_build.build_loader, trainer_build.build_optimizer

BUGS: dict[str, Bug] = {
    "tensor: a row-parallel layer's outputs are not summed": Bug(TENSOR, ((tensor, "leave", lambda x, axis: x),)),
    "tensor: a column-parallel layer's input gradients are not summed": Bug(
        SPLIT, ((tensor._Copy, "backward", staticmethod(_not_summed)),)
    ),
    "tensor: each rank's heads drop what the first heads drop": Bug(
        TENSOR, ((attention, "replace", _without("first_head")),)
    ),
    "tensor: ranks hold each other's shards": Bug(TENSOR, ((init, "local_box", _mirrored),)),
    "tensor: what every rank holds counts on each in the norm": Bug(
        TENSOR, ((step, "is_cut", lambda parameter: True),), "gradient norm"
    ),
    "sequence: gradients of norms and biases stay those of a slice": Bug(
        SEQUENCE, ((parallelize, "sum_sliced_gradients", _nothing),), "gradient of position_embedding.weight"
    ),
    "sequence: gradients of norms and biases are summed twice": Bug(
        SEQUENCE, ((parallelize, "sum_sliced_gradients", _summed_twice),), "gradient of position_embedding.weight"
    ),
    "sequence: each slice drops what the first slice drops": Bug(SEQUENCE, ((gpt.Block, "_key", _first_slice_key),)),
    "pipeline: the tied embedding's gradients are not added across the ends": Bug(
        PIPELINE, ((parallelize, "add_across_ends", _nothing),)
    ),
    "pipeline: the tied embedding counts on both ends in the norm": Bug(
        PIPELINE, ((TrainState, "weights", _all_weights),), "gradient norm"
    ),
    "pipeline: gradients are divided by the number of micro-batches": Bug(
        PIPELINE, ((pipeline, "get_schedule_class", lambda name: _averaging),)
    ),
    "pipeline: the second part drops by another sample's number": Bug(
        PIPELINE, ((pipeline._Plain, "forward", _next_samples),)
    ),
    "context: positions are those of one run": Bug(CONTEXT, ((context.ContextAxis, "positions", _as_they_lie),)),
    "context: a rank reads two chunks side by side": Bug(CONTEXT, ((prepared, "chunk_starts", _one_after_the_other),)),
    "context: attention drops by the place within a chunk": Bug(
        CONTEXT, ((attention, "replace", _without("first_position")),)
    ),
    "context: the second chunk drops as if it followed the first": Bug(CONTEXT, ((gpt.Block, "_key", _no_gap),)),
    "context: gradients of keys and values are those of a rank's own queries": Bug(
        CONTEXT, ((context, "reduce_scatter_single", _not_scattered),)
    ),
    "context: gathered keys and values are not in the order of positions": Bug(
        CONTEXT, ((context, "_owners", _in_order_of_ranks),)
    ),
    "context: gradients are not summed over its ranks": Bug(
        CONTEXT, ((zero.FSDPModule, "set_requires_all_reduce", _never_all_reduced),)
    ),
    "context: gradients are not reduced to the shards of its ranks": Bug(
        SHARDED, ((pipeline, "before_backward", _never_last),)
    ),
    "context: the valid tokens are those of one chunk": Bug(CONTEXT, ((step, "all_reduce", _of_one_data_rank),)),
    "expert: gradients of tokens are multiplied by the degree": Bug(
        moe.EXPERT, ((expert._Exchange, "backward", staticmethod(_own_rows_twice)),)
    ),
    "expert: the norm misses the experts": Bug(moe.EXPERT, ((step, "_counts", _without_experts),), "gradient norm"),
    "expert: the router's gradient is that of a rank's hidden units": Bug(
        moe.SLICED, ((experts, "enter", _entered_alone),)
    ),
    "expert: loads are counted again in recomputation": Bug(
        moe.RECOMPUTED,
        ((experts._Counted, "forward", staticmethod(_counted_forward)),),
        "buffer of layers.1.mlp.router.load",
    ),
    "expert: loads are those of one rank": Bug(
        moe.EXPERT, ((experts, "all_reduce", _local),), "buffer of layers.1.mlp.router.bias"
    ),
    "tensor: shards count on one rank in the norm": Bug(
        TENSOR, ((step, "is_cut", lambda parameter: False),), "gradient norm"
    ),
    "zero: what copies hold counts on each in the norm": Bug(
        HYBRID, ((Mesh, "is_first", _first_of_all),), "gradient norm"
    ),
    "expert: the norm misses the experts beside tensor ranks": Bug(
        moe.BOTH, ((step, "_counts", _without_experts),), "gradient norm"
    ),
    "expert: gradients of weights are divided by the degree": Bug(
        moe.COPIED,
        ((zero.FSDPModule, "set_gradient_divide_factor", _experts_divided_by(2.0)),),
        "gradient of layers.0.mlp",
    ),
    "expert: gradients of weights are doubled": Bug(
        moe.COPIED,
        ((zero.FSDPModule, "set_gradient_divide_factor", _experts_divided_by(0.5)),),
        "gradient of layers.0.mlp",
    ),
    "expert: the router's losses grow with the tensor degree": Bug(
        moe.SLICED, ((experts.Router, "_losses", _losses_times(2.0)),)
    ),
    "expert: the router's losses shrink with the context degree": Bug(
        moe.HALVED, ((experts.Router, "_losses", _losses_times(0.5)),)
    ),
    "data: the valid tokens are those of one rank": Bug(DATA, ((step, "all_reduce", _counted_here),)),
    "data: every rank reads the samples of rank 0": Bug(DATA, ((run_build, "build_loader", _loader_of_rank_0),)),
    "data: samples are numbered within the rank": Bug(DATA, ((Loader, "batch", _numbered_in_the_rank),)),
    "data: gradients are averaged over ranks": Bug(DATA, ((zero.FSDPModule, "set_gradient_divide_factor", _nothing),)),
    "zero: gradients are not reduced": Bug(ZERO, ((pipeline, "before_backward", _never_last),)),
    "zero: copies of the shards do not sum their gradients": Bug(
        HYBRID, ((zero.FSDPModule, "set_requires_all_reduce", _never_all_reduced),)
    ),
    "zero: ranks hold each other's shards": Bug(ZERO, ((init, "local_box", _mirrored),)),
    "zero: each rank clips by the norm of its own shards": Bug(
        ZERO, ((step, "all_reduce", _own_norm),), "gradient norm"
    ),
    "zero: weight decay is left out on all ranks but the first": Bug(
        ZERO, ((trainer_build, "build_optimizer", _no_decay_on_later_ranks),), "value of token_embedding.weight"
    ),
}
