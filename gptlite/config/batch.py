"""Checks that the global batch can be split over data-parallel ranks and micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from gptlite.config.schema import Config
from gptlite.data.batches import batch_schedule
from gptlite.errors import ConfigError
from gptlite.models.registry import spec_of
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.layout import (
    Layout,
    accumulation,
    divisors,
    largest_micro_batch,
    listed,
    resolve,
    runs_batch,
    schedule_refuses,
    wanted_world,
)

MAX_STEP_TOKENS = 2**31  # far above any published batch, so a larger value is probably a typo


def check_batch(config: Config) -> None:
    """Raise ConfigError for a global batch that cannot be split over the ranks."""
    data, layout = config.data, config.parallelism
    if (tokens := data.global_batch_size * data.sequence_length) > MAX_STEP_TOKENS:
        raise ConfigError(f"data.global_batch_size={data.global_batch_size} is {tokens:,} tokens per step; lower it")
    if layout.data is not None:
        check_world(config, wanted_world(layout, gpus=0))
        return
    # The number of ranks is not known yet, so refuse only a batch that no number of ranks can run.
    most = data.global_batch_size // (data.micro_batch_size or 1)
    problems = [_batch_problem(config, data_size) for data_size in (1, max(most, 1))]  # smallest, largest
    if all(problems):
        raise ConfigError(problems[0])


def check_world(config: Config, world: int) -> Layout:
    """Return the layout of a run on `world` ranks. Raises a one-line ConfigError if the degrees do not divide `world`,
    the batch cannot be split over the data-parallel ranks, or a rank has no row of an embedding that they reduce."""
    layout = resolve(config.parallelism, world)
    if problem := _batch_problem(config, layout.data_size):
        raise ConfigError(problem)
    rows, ranks = spec_of(config.model).table_rows(config.model), layout.size("tp")
    fit = [degree for degree in divisors(ranks) if rows is None or -(-rows // -(-rows // degree)) == degree]
    if fit[-1] < ranks and (layout.fsdp_size > 1 or config.parallelism.offload is not Offload.none):
        raise ConfigError(f"parallelism.tensor={ranks} leaves a rank without any of the {rows} rows of the embedding, "
                          f"whose gradients ZeRO reduces; use parallelism.tensor={listed(fit, 'or')}")  # fmt: skip
    return layout


def _batch_problem(config: Config, data_size: int) -> str:
    """Return the reason why the batch cannot be split over `data_size` data-parallel ranks, and values that would work.

    Return an empty string if the batch can be split, or if the calling program supplies the batches.
    """
    if config.data.handed_over:
        return ""
    layout = replace(config.parallelism, elastic=config.parallelism.elastic and config.data.unit == "tokens")
    batch, micro = config.data.global_batch_size, config.data.micro_batch_size

    def fits(batch: int, micro: int) -> bool:
        return runs_batch(layout, batch, micro, data_size)

    idle = layout.elastic and batch < data_size
    if not idle and (largest_micro_batch(layout, [batch], data_size) if micro is None else fits(batch, micro)):
        return _ramp_problem(config, layout, data_size)
    step = (micro or 1) * data_size
    if idle:
        problem = f"fewer samples than data={data_size} ranks"
    elif batch % step and not layout.elastic:
        size = "data.micro_batch_size" + ("" if micro is None else f"={micro}")
        problem = f"{size} x accumulation x data={data_size} has no integer solution for accumulation"
    else:
        count = accumulation(batch, micro or 1, data_size)
        problem = f"data.micro_batch_size={micro or 1} x accumulation={count} x data={data_size}: "
        problem += schedule_refuses(layout, count)
    sizes = [s for s in divisors(batch // data_size) if fits(batch, s)] if batch % data_size == 0 else []
    tries = [f"data.micro_batch_size={listed(sizes, 'or')}"] if sizes else []
    tries.append(f"data.global_batch_size={listed(_nearest(batch, step, lambda b: fits(b, micro or 1)), 'or')}")
    fewer = [size for size in divisors(data_size)[:-1] if runs_batch(layout, batch, micro or 1, size)]
    if layout.data == data_size and fewer:  # the degree was given, or comes from the resumed run
        tries.append(f"parallelism.data={listed(fewer, 'or')}")
    return f"data.global_batch_size={batch} = {problem}; try {', or '.join(tries)}"


def _ramp_problem(config: Config, layout: ParallelismConfig, data_size: int) -> str:
    """Return the reason why a size in the batch ramp cannot be split over the data-parallel ranks; an empty string if
    all sizes can. data.global_batch_size itself must be valid."""
    data, micro = config.data, config.data.micro_batch_size or 1
    sizes = batch_schedule(data.global_batch_size, data.batch_ramp).sizes()
    if data.micro_batch_size is None and largest_micro_batch(layout, sizes, data_size):
        return ""
    size = next((size for size in sizes if not runs_batch(layout, size, micro, data_size)), None)
    if size is None:
        return ""
    unit = micro * data_size
    problem = f"data.batch_ramp={data.batch_ramp} includes a global batch size of {size}"
    if size % unit and not layout.elastic:
        return (
            f"{problem}, which is not divisible by data.micro_batch_size={micro} x data={data_size}; "
            f"use a first size and an increment that are multiples of {unit}"
        )
    why = schedule_refuses(layout, accumulation(size, micro, data_size))
    return f"{problem}: {why}; use a larger first size or another increment"


def _nearest(value: int, step: int, fits: Callable[[int], bool]) -> list[int]:
    """Return the multiples of `step` nearest to `value` for which `fits` is true: the largest that does not exceed
    `value`, if any, and the smallest above it."""
    below = next((n for n in range(value // step * step, 0, -step) if fits(n)), None)
    above = next(n for n in itertools.count(value // step * step + step, step) if fits(n))
    return [above] if below is None else [below, above]
