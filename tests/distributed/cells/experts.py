"""Layouts of a small mixture of experts on 8 ranks, and those in which bugs are planted."""

from __future__ import annotations

from itertools import cycle, product

from distributed.cells.layouts import Cell

TOP_K = 2
# The head's z-loss is on in every cell.
SIZES = ("model.moe.experts=8", f"model.moe.top_k={TOP_K}", "model.moe.d_ff=16", "model.z_loss=0.01")
BIAS = (*SIZES, "model.moe.bias_rate=0.01", "model.moe.every=2")
LOSSES = (*SIZES, "model.moe.shared=1", "model.moe.sequence_loss=0.1", "model.moe.z_loss=0.01", "model.moe.bias_rate=0")
SIGMOID = (*SIZES, "model.moe.score=sigmoid", "model.moe.renormalize=false", "model.mlp=swiglu", "model.bias=false")
BALANCES = BIAS, LOSSES, SIGMOID
# tensor, pipeline, context and data degrees of 8 ranks
DEGREES = (
    *((1, 1, 1, 8), (2, 1, 1, 4), (1, 2, 1, 4), (2, 2, 1, 2), (1, 1, 2, 4), (2, 1, 2, 2), (1, 2, 2, 2), (1, 4, 1, 2)),
    (4, 1, 1, 2),
)
SCHEDULES = ("1f1b", "zero_bubble", "interleaved_1f1b")


def cells() -> list[Cell]:
    """Every degree of experts on every layout and ZeRO stage, with the ways of balancing, schedules and recomputation
    taken in turn."""
    found, schedules, balances = [], cycle(SCHEDULES), cycle(BALANCES)
    recomputed, slices = cycle(("none", "full", "none", "selective")), cycle((False, True))
    for (tensor, pipeline, context, data), expert, zero in product(DEGREES, (1, 2, 4, 8), range(4)):
        if (data * context) % expert:
            continue
        found.append(
            Cell(
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                data=data,
                zero=zero,
                schedule=next(schedules) if pipeline > 1 else "none",
                sequence=tensor > 1 and next(slices),
                accumulation=4 if pipeline > 1 else 2,
                checkpointing=next(recomputed),
                shared=next(balances),
                more=(f"parallelism.expert={expert}",),
            )
        )
    return found


CELLS = cells()
HYBRID = Cell(data=8, replicate=2, zero=2, accumulation=2, shared=BIAS, more=("parallelism.expert=2",))
# Compiled blocks leave experts and routers out; selective recomputation meets gathers inside blocks.
COMPILED = Cell(data=2, zero=3, accumulation=2, shared=LOSSES, more=("parallelism.expert=2", "trainer.compile=true"))
SELECTIVE = Cell(data=2, zero=3, accumulation=2, checkpointing="selective", shared=LOSSES, more=COMPILED.more[:1])
# For every run: experts in copies, over ranks of a sequence and of data; and a pipeline that recomputes.
QUICK = [
    Cell(data=2, context=2, accumulation=2, shared=LOSSES, more=("parallelism.expert=2",)),
    Cell(tensor=2, data=2, zero=3, sequence=True, shared=SIGMOID, more=("parallelism.expert=2",)),
    Cell(pipeline=2, data=2, zero=1, schedule="1f1b", accumulation=4, checkpointing="full", shared=BIAS,
         more=("parallelism.expert=2",)),
]  # fmt: skip
EXPERT = Cell(data=2, accumulation=2, shared=BIAS, more=("parallelism.expert=2",))
SLICED = Cell(tensor=2, accumulation=2, shared=LOSSES)
RECOMPUTED = Cell(data=2, accumulation=2, checkpointing="full", shared=BIAS)
BOTH = Cell(tensor=2, data=2, accumulation=2, shared=SIGMOID, more=("parallelism.expert=2",))
COPIED = Cell(data=4, zero=2, accumulation=2, shared=LOSSES, more=("parallelism.expert=2",))
HALVED = Cell(context=2, accumulation=2, shared=LOSSES)
