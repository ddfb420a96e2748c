"""Batch keys of a DeepSpeed JSON, whose arithmetic holds for one number of data ranks.

DeepSpeed's rule is train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks, and
any of the three may be left out. Here data.global_batch_size is always given, and the accumulation follows.
"""

from __future__ import annotations

from collections.abc import Container

from gptlite.config.deepspeed.rows import AUTO, Kind, Section

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
GLOBAL = "data.global_batch_size"


def batch(root: Section, ranks: int | None, given: Container[str]) -> None:
    """Add the rows of the batch keys. `ranks` is the number of data ranks if it is known; `given` are the command
    line's own keys, which make the arithmetic theirs."""
    train, micro, steps = (root.get(name, Kind.count) for name in (TRAIN, MICRO, STEPS))
    auto = {name for name, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)) if value == AUTO}
    train, micro, steps = (None if value == AUTO else value for value in (train, micro, steps))
    if train:
        root.take(TRAIN, data__global_batch_size=train)
    if micro:
        root.take(MICRO, data__micro_batch_size=micro)
    if GLOBAL in given or (train and "data.micro_batch_size" in given):
        if steps:
            root.no_op(STEPS, "the batch is the command line's; accumulation follows from it")
    elif train:
        _checked(root, train, micro, steps, ranks)
    elif micro and (steps or not auto & {TRAIN, STEPS}):
        _inferred(root, micro, steps, ranks)
    elif steps:
        root.no_op(STEPS, "follows from data.global_batch_size, the micro-batch and the ranks")


def _checked(root: Section, train: int, micro: int | None, steps: int | None, ranks: int | None) -> None:
    """Check a given global batch against the other two keys."""
    if micro and steps:
        wanted, rest = divmod(train, micro * steps)
        equation = f"train_batch_size={train} = {micro} x {steps} x data ranks"
        if rest:
            root.refuse(STEPS, f"{equation} has no whole number of ranks")
        elif ranks not in (None, wanted):
            root.refuse(STEPS, f"{equation} means {wanted}, not {ranks}; change one, or give data.global_batch_size")
        else:
            root.take(STEPS, f"{train} / ({micro} x {steps})", parallelism__data=wanted)
    elif ranks and train % (ranks * (micro or steps or 1)):
        name = MICRO if micro else STEPS if steps else TRAIN
        root.refuse(name, f"train_batch_size={train} is not divisible by {micro or steps or 1} x {ranks} data ranks")
    elif steps and ranks:
        root.take(STEPS, f"{train} / ({steps} x {ranks})", data__micro_batch_size=train // (steps * ranks))
    elif steps:
        root.no_op(STEPS, "the run takes the largest micro-batch; the global batch is the same")


def _inferred(root: Section, micro: int, steps: int | None, ranks: int | None) -> None:
    """Infer the global batch, which needs the number of data ranks."""
    equation = f"the global batch is {micro} x {steps or 1} x data ranks"
    name = STEPS if steps else MICRO
    if ranks is None:
        root.refuse(name, f"{equation}; give parallelism.data=N (import-config: ranks=N), or data.global_batch_size")
    else:
        root.take(name, f"{equation}={ranks}", data__global_batch_size=micro * (steps or 1) * ranks)
