"""Which layouts stand for all of them: greedy covers of the legal combinations of axis values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache, reduce
from heapq import heappop, heapreplace
from itertools import combinations, product
from operator import or_
from typing import Any

from distributed.cells.layouts import GLOBAL_BATCH, Cell
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import schedule_refuses

MOST_MESSAGES = 16  # tensor ranks x micro-batches: eight ranks on two cores take long for more
Met = frozenset[tuple[Any, ...]]  # combinations of axis values: axis, value, axis, value, ...

AXES: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4, 8),
    "pipeline": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "schedule": ("none", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"),
    "sequence": (False, True),
    "tied": (True, False),
    "vocabulary": ("padded", "uneven"),
    "accumulation": (1, 3, 4),  # 1F1B needs one for each of four ranks
    "checkpointing": ("none", "full", "selective"),
}
# Of sequences cut over ranks every combination with these, too.
CONTEXT_AXES = AXES | {"context": (2, 4, 8)}
# Where state is and what computes, crossed with every way to cut the model: any three of these that can meet do so.
CROSSED_AXES: dict[str, tuple[Any, ...]] = {
    "context": (1, 2, 4),
    "offload": ("none", "cpu", "nvme"),
    "precision": ("fp32", "bf16", "fp16", "amp_o1", "amp_o2"),
    "tensor": AXES["tensor"],
    "pipeline": AXES["pipeline"],
    "zero": AXES["zero"],
    "accumulation": AXES["accumulation"],
}
FIRST_MATRIX = (1, "none", "fp32")  # of the first three, what the cells without them try


def legal(cell: Cell) -> bool:
    """Whether a combination of axis values is a layout of eight ranks, and says each thing once.

    `gptlite.config.load` has the last word on the cells chosen; this only sifts thousands of combinations fast.
    """
    if cell.world != 8 or (cell.pipeline == 1) != (cell.schedule == "none") or (cell.sequence and cell.tensor == 1):
        return False
    if cell.tensor * cell.accumulation > MOST_MESSAGES:
        return False
    if (cell.zero and cell.data * cell.context == 1) or GLOBAL_BATCH % (cell.data * cell.accumulation):
        return False
    if cell.pipeline == 1:
        return True
    config = ParallelismConfig(pipeline=cell.pipeline, schedule=cell.schedule)
    return not schedule_refuses(config, cell.accumulation)


@lru_cache
def legal_cells(context: bool = False) -> list[Cell]:
    """Every legal combination of the axes on eight ranks; with or without cut sequences."""
    cells, axes = [], CONTEXT_AXES if context else AXES
    for values in product(*axes.values()):
        named = dict(zip(axes, values, strict=True))
        degrees = named["tensor"] * named["pipeline"] * named.get("context", 1)
        if degrees <= 8 and legal(cell := Cell(data=8 // degrees, **named)):
            cells.append(cell)
    return cells


def met(cell: Cell, axes: Iterable[str], number: int) -> Met:
    """What a cell tries together: its values of every `number` of the axes."""
    named = [(axis, getattr(cell, axis)) for axis in axes]
    return frozenset(combinations(named, number))


def pairs(cell: Cell) -> Met:
    """Every two axis values of a cell."""
    return met(cell, CONTEXT_AXES if cell.context > 1 else AXES, 2)


def crossings(cell: Cell) -> Met:
    """Of the crossed axes every three values of a cell, of all axes every two."""
    return met(cell, CROSSED_AXES, 3) | met(cell, CROSSED_AXES | AXES, 2)


_bits: dict[tuple[Any, ...], int] = {}  # a number for each combination of axis values


@cache
def _mask(cell: Cell, meets: Callable[[Cell], Met]) -> int:
    """What a cell meets, as bits."""
    return reduce(or_, (1 << _bits.setdefault(each, len(_bits)) for each in meets(cell)))


def cover(candidates: list[Cell], meets: Callable[[Cell], Met], count: int | None = None) -> list[Cell]:
    """Cells that between them meet all that the candidates meet, early ones most; then more, up to `count`.

    Greedy, the same on every machine: the cell with the most that is new for its cost, ties by the order of candidates.
    Once all has been met, it is to be met again.
    """
    candidates = list(dict.fromkeys(candidates))
    masks = [_mask(cell, meets) for cell in candidates]
    worth = [cell.cost**0.5 for cell in candidates]
    everything = missing = reduce(or_, masks)
    picked: list[Cell] = []

    def queued(index: int) -> tuple[float, int]:
        return -((masks[index] & missing).bit_count() / worth[index]), index

    queue = sorted(map(queued, range(len(candidates))))
    while len(picked) < count if count else missing:
        # What a cell meets that is new only gets less, so the first in the queue that is as good as it was is the best.
        while (first := queued(queue[0][1])) != queue[0]:
            heapreplace(queue, first)
        index = heappop(queue)[1]
        picked.append(candidates[index])
        missing &= ~masks[index]
        if count and not missing:
            missing = everything
            queue = sorted(queued(index) for _, index in queue)
    return picked


@lru_cache
def chosen(count: int, seed: int = 3, context: bool = False) -> list[Cell]:
    """`count` legal cells in which every two axis values that can meet do so."""
    candidates = list(legal_cells(context))
    random.Random(seed).shuffle(candidates)
    return cover(candidates, pairs, count)


@lru_cache
def crossed(seed: int = 3) -> list[Cell]:
    """Legal cells in which every three values of the crossed axes that can meet do so, and every two of all axes.

    Candidates are all layouts, and of each way to cut the model all kinds of offload and precision: which of the two
    go together is by lot.
    """
    layouts = [cell for cell in (*legal_cells(), *legal_cells(context=True)) if cell.context < 8]
    random.Random(seed).shuffle(layouts)
    cuts: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in layouts:
        cuts.setdefault((cell.context, cell.tensor, cell.pipeline, cell.zero, cell.accumulation), []).append(cell)
    kinds = list(product(CROSSED_AXES["offload"], CROSSED_AXES["precision"]))
    candidates = [
        replace(cell, offload=offload, precision=precision)
        for cells in cuts.values()
        for index in range(max(len(cells), len(kinds)))
        for cell, (offload, precision) in [(cells[index % len(cells)], kinds[index % len(kinds)])]
        if (cell.context, offload, precision) != FIRST_MATRIX
    ]
    return cover(candidates, crossings)
