"""Mutations of collectives: at one place in the code, a collective is left out, doubled or averaged, runs over another
axis's group, or misses a rank.

A place is a function of the product, by the end of its file's path and its qualified name; the collectives that run
below it are changed while the mutation is planted. All ranks plant it, so none waits for another.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from distributed.cells import experts as moe
from distributed.cells.layouts import Cell
from gptlite.parallelism import collectives, context, tensor
from gptlite.parallelism.point_to_point import PairwiseAllGather, PairwiseReduceScatter

SEED = 46
DEPTH = 12  # frames between a collective and the function that stands for it
GATHERS = "all_gather_single", "all_gather"
SUMS = ("left out", "doubled", "averaged", "another axis's group", "without the last rank")
MOVES = ("left out", "another axis's group", "without the last rank")  # nothing is added up, so nothing to double


@dataclass(frozen=True)
class Place:
    """Function in which collectives run along an axis, and a layout in which they do. `kinds`: what can be changed."""

    axis: str
    file: str
    function: str
    cell: Cell
    kinds: tuple[str, ...] = SUMS

    def holds(self, frame: FrameType | None) -> bool:
        """Return True if a frame was called from this function."""
        for _ in range(DEPTH):
            if frame is None:
                return False
            if frame.f_code.co_qualname == self.function and frame.f_code.co_filename.endswith(self.file):
                return True
            frame = frame.f_back
        return False


@dataclass(frozen=True)
class Mutation:
    """A change of the collectives at a place."""

    place: Place
    kind: str

    @property
    def id(self) -> str:
        return f"{self.place.axis}: {self.place.function} {self.kind}"


TENSOR = Cell(tensor=2, data=2, accumulation=3)
SEQUENCE = replace(TENSOR, sequence=True)
SPLIT = Cell(tensor=2, pipeline=2, schedule="zero_bubble", accumulation=4)  # where no layer overlaps communication
SLICED = replace(SPLIT, sequence=True)
GROUPED = replace(TENSOR, shared=("model.kv_heads=1",))
CONTEXT = Cell(context=2, data=2, accumulation=3, zero=2)
DATA = replace(TENSOR, zero=2)
COPIES = replace(TENSOR, zero=0)
MUON = replace(DATA, shared=("optimizer=muon", "optimizer.lr=1e-3"))
LAMB = replace(DATA, shared=("optimizer=lamb", "optimizer.lr=1e-3"))
EXPERT = Cell(tensor=2, data=2, accumulation=2, shared=moe.BIAS, more=("parallelism.expert=2",))
BALANCED = Cell(tensor=2, data=2, sequence=True, accumulation=2, shared=moe.LOSSES, more=("parallelism.expert=2",))
FSDP = "_fully_shard/_fsdp_collectives.py"
TENSORS, STEP = "parallelism/tensor.py", "trainer/step.py"
ALONE = tuple(kind for kind in SUMS if kind != "another axis's group")  # other stages do other things meanwhile

PLACES = (
    Place("tensor", TENSORS, "_Copy.backward", SPLIT, ALONE),
    Place("tensor", TENSORS, "_Sum.forward", TENSOR),
    Place("tensor", TENSORS, "_OverlappedColumn.backward", TENSOR),
    Place("tensor", TENSORS, "TensorAxis.gather", TENSOR, MOVES),
    Place("tensor", TENSORS, "_Columns.forward", GROUPED, MOVES[::2]),  # gloo refuses other lengths
    Place("tensor", TENSORS, "_Columns.backward", GROUPED, MOVES[::2]),
    Place("sequence", TENSORS, "_Scatter.forward", SEQUENCE),
    Place("sequence", TENSORS, "_Scatter.backward", SEQUENCE, MOVES),
    Place("sequence", TENSORS, "_Gather.forward", SLICED, ("left out", "without the last rank")),
    Place("sequence", TENSORS, "_Gather.backward", SLICED, ALONE),
    Place("sequence", TENSORS, "_OverlappedColumn.forward", SEQUENCE, MOVES),
    Place("sequence", TENSORS, "_OverlappedColumn.backward", SEQUENCE),
    Place("sequence", TENSORS, "sum_sliced_gradients", SEQUENCE),
    Place("context", "parallelism/context.py", "_fill", CONTEXT, MOVES),
    Place("context", "parallelism/context.py", "_Gather.backward", CONTEXT),
    Place("expert", "parallelism/expert.py", "_Exchange.forward", EXPERT, ("without the last rank",)),
    Place("expert", "parallelism/expert.py", "_Exchange.backward", EXPERT, MOVES[::2]),
    Place("expert", "models/experts.py", "Router._losses", BALANCED),
    Place("expert", "models/experts.py", "balance", BALANCED, ALONE),  # it sums over both axes anyway
    Place("zero", FSDP, "foreach_reduce", DATA),
    Place("zero", FSDP, "foreach_all_gather", DATA, MOVES),
    Place("data", FSDP, "foreach_reduce", COPIES),
    Place("expert", FSDP, "foreach_reduce", moe.COPIED, ("another axis's group",)),
    Place("data", STEP, "Step._gradients", TENSOR, ("left out", "doubled", "averaged", "without the last rank")),
    Place("data", STEP, "Step._total", DATA, ("left out", "doubled", "averaged", "without the last rank")),
    Place("optimizer", "parallelism/matrix_gather.py", "_exchange", MUON, MOVES[::2]),
    Place("optimizer", "parallelism/collectives.py", "_ordered_sum", LAMB, MOVES[::2]),
)


def every() -> dict[str, Mutation]:
    """Return all mutations by name."""
    return {mutation.id: mutation for mutation in (Mutation(place, kind) for place in PLACES for kind in place.kinds)}


def drawn(count: int = 40, seed: int = SEED) -> list[str]:
    """Return the names of some mutations: one of each place first, the others at random."""
    chance = random.Random(seed)
    by_place = [[Mutation(place, kind).id for kind in place.kinds] for place in PLACES]
    first = [chance.choice(names) for names in by_place]
    others = [name for names in by_place for name in names if name not in first]
    return [*first, *chance.sample(others, count - len(first))]


class Done:
    """Work handle of a collective that has run."""

    def wait(self, *_: Any) -> bool:
        return True


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """While entered, the collectives at the mutation's place are changed."""
    with ExitStack() as stack:
        for where, name, change in _TARGETS:
            original = getattr(where, name)
            stack.enter_context(patch.object(where, name, _changed(original, mutation, change)))
        yield


def _changed(original: Callable[..., Any], mutation: Mutation, change: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def collective(*args: Any, **options: Any) -> Any:
        if not mutation.place.holds(inspect.currentframe().f_back):  # type: ignore[union-attr]
            return original(*args, **options)
        bound = dict(signature.bind(*args, **options).arguments)
        asynchronous = bound.pop("async_op", False)
        change(original, bound, mutation.kind)
        return Done() if asynchronous else None

    return collective


def _reduced(original: Callable[..., Any], bound: dict[str, Any], kind: str) -> None:
    """All-reduce in place."""
    value: Tensor = bound["tensor"]
    group = bound.get("group")
    if kind == "left out":
        return
    if kind == "without the last rank" and _is_last(group):
        value.zero_()
    original(**_elsewhere(bound, kind))
    if kind == "doubled":
        original(**bound)
    if kind == "averaged":
        size = dist.get_world_size(group)
        value.div_(size) if value.is_floating_point() else value.floor_divide_(size)


def _scattered(original: Callable[..., Any], bound: dict[str, Any], kind: str) -> None:
    """Reduce-scatter into the first argument."""
    names = [name for name in bound if name != "self"]
    out, sent, group = bound[names[0]], bound[names[1]], bound.get("group")
    size = dist.get_world_size(group)
    own = sent.reshape(size, -1)[dist.get_rank(group)].view_as(out)
    if kind == "left out":
        out.copy_(own)
        return
    if kind == "without the last rank" and _is_last(group):
        bound = bound | {names[1]: torch.zeros_like(sent)}
    original(**_elsewhere(bound, kind))
    if kind == "doubled":
        again = torch.empty_like(out)
        original(**bound | {names[0]: again})
        out.add_(again)
    if kind == "averaged":
        out.div_(size)


def _gathered(original: Callable[..., Any], bound: dict[str, Any], kind: str) -> None:
    """All-gather into the first argument."""
    names = [name for name in bound if name != "self"]
    out, sent, group = bound[names[0]], bound[names[1]], bound.get("group")
    if kind == "left out":
        size = dist.get_world_size(group)
        out.view(size, -1).copy_(sent.reshape(1, -1).expand(size, -1))
        return
    if kind == "without the last rank" and _is_last(group):
        bound = bound | {names[1]: torch.zeros_like(sent)}
    original(**_elsewhere(bound, kind))


def _exchanged(original: Callable[..., Any], bound: dict[str, Any], kind: str) -> None:
    """All-to-all into the first argument."""
    out, sent, group = bound["output"], bound["input"], bound.get("group")
    if kind == "left out":
        out.zero_()
        count = min(out.numel(), sent.numel())
        out.view(-1)[:count] = sent.reshape(-1)[:count]
        return
    if kind == "without the last rank" and _is_last(group):
        bound = bound | {"input": torch.zeros_like(sent)}
    original(**_elsewhere(bound, kind))


def _is_last(group: dist.ProcessGroup | None) -> bool:
    return dist.get_rank(group) == dist.get_world_size(group) - 1


def _elsewhere(bound: dict[str, Any], kind: str) -> dict[str, Any]:
    """The arguments, for `another axis's group` with a group of as many other ranks."""
    if kind != "another axis's group":
        return bound
    ranks = set(dist.get_process_group_ranks(bound["group"]))
    for group in _world.pg_map:
        others = set(dist.get_process_group_ranks(group))
        if len(others) == len(ranks) and others != ranks:
            return bound | {"group": group}
    return bound  # a collective over all ranks


_TARGETS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (dist, "all_reduce", _reduced),
    (dist, "all_to_all_single", _exchanged),
    # FSDP2's own, which the check of types sees; on gloo, ours replace them.
    *((dist, name, _scattered) for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)),
    *((dist, name, _gathered) for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)),
    (tensor, "reduce_scatter_single", _scattered),
    (context, "reduce_scatter_single", _scattered),
    *((module, "all_gather_single", _gathered) for module in (tensor, context, collectives)),
    (PairwiseReduceScatter, "__call__", _scattered),
    (PairwiseAllGather, "__call__", _gathered),
)
