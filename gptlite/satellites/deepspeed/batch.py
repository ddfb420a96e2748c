"""Translation of the batch keys of a DeepSpeed JSON.

DeepSpeed's rule is train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks, where
the data ranks are the data-parallel ranks, and any of the three keys may be left out. In gptlite,
data.global_batch_size is always set, and the number of gradient accumulation steps follows from it.
"""

from __future__ import annotations

from collections.abc import Container

from gptlite.satellites.deepspeed.rows import AUTO, Kind, Section

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
GLOBAL = "data.global_batch_size"


def batch(root: Section, ranks: int | None, overridden: Container[str]) -> None:
    """Add the rows of the batch keys. `ranks` is the number of data ranks, if it is known. `overridden` are the keys
    that the command line sets; if they set the batch, the file's arithmetic is not checked."""
    train, micro, steps = (root.get(name, Kind.count) for name in (TRAIN, MICRO, STEPS))
    auto = {name for name, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)) if value == AUTO}
    train, micro, steps = (None if value == AUTO else value for value in (train, micro, steps))
    if train:
        root.take(TRAIN, data__global_batch_size=train)
    if micro:
        root.take(MICRO, data__micro_batch_size=micro)
    if GLOBAL in overridden or (train and "data.micro_batch_size" in overridden):
        if steps:
            root.no_op(STEPS, "the command line sets the batch, and accumulation follows from it")
    elif train:
        _checked(root, train, micro, steps, ranks)
    elif micro and (steps or not auto & {TRAIN, STEPS}):
        _inferred(root, micro, steps, ranks)
    elif steps:
        root.no_op(STEPS, "follows from data.global_batch_size, the micro-batch size and the number of ranks")


def _checked(root: Section, train: int, micro: int | None, steps: int | None, ranks: int | None) -> None:
    """Check a given global batch against the other two keys."""
    if micro and steps:
        wanted, rest = divmod(train, micro * steps)
        equation = f"train_batch_size={train} = {micro} x {steps} x data ranks"
        if rest:
            root.refuse(STEPS, f"{equation} has no integer solution for data ranks")
        elif ranks not in (None, wanted):
            root.refuse(STEPS, f"{equation} gives {wanted}, not {ranks}; change one, or set data.global_batch_size")
        else:
            root.take(STEPS, f"{train} / ({micro} x {steps})", parallelism__data=wanted)
    elif ranks and train % (ranks * (micro or steps or 1)):
        name = MICRO if micro else STEPS if steps else TRAIN
        root.refuse(name, f"train_batch_size={train} is not divisible by {micro or steps or 1} x {ranks} data ranks")
    elif steps and ranks:
        root.take(STEPS, f"{train} / ({steps} x {ranks})", data__micro_batch_size=train // (steps * ranks))
    elif steps:
        root.no_op(STEPS, "gptlite uses the largest micro-batch that fits; the global batch is unchanged")


def _inferred(root: Section, micro: int, steps: int | None, ranks: int | None) -> None:
    """Infer the global batch from the number of data ranks. Refuse the key if that number is unknown."""
    equation = f"the global batch is {micro} x {steps or 1} x data ranks"
    name = STEPS if steps else MICRO
    if ranks is None:
        root.refuse(name, f"{equation}; set parallelism.data=N (import-config: ranks=N), or data.global_batch_size")
    else:
        root.take(name, f"{equation}={ranks}", data__global_batch_size=micro * (steps or 1) * ranks)
