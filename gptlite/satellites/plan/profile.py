"""Profiles of a workload's model, from the caches or newly recorded.

A profile is recorded by running the model's code with fake tensors (`probe.py`), at two micro-batch sizes. Larger sizes
are extrapolated, as bytes and shapes grow linearly, except for samples on a CPU, where oneDNN may choose another
algorithm for a convolution. If the two profiles differ in more than sizes, e.g. in the number of a loss's chunks, the
requested size is recorded instead. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.parallelism.layout import Layout, splits_backward
from gptlite.satellites.plan.cache import cached
from gptlite.satellites.plan.parameters import with_blocks
from gptlite.satellites.plan.segments import PARTS, SIZES, Halves, Profile, between
from gptlite.satellites.plan.workload import SETTLED, Workload

SHORTEST = 512  # positions; bytes of a shorter sequence may not be linear, as it can be below a kernel's chunk size


def profile_key(work: Workload, tp_rank: int = 0) -> tuple[object, ...]:
    """Return the cache key of a profile: the fields that it depends on."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size(EXPERT), layout.size("pp") == 1, work.sharded
    # On a CPU, ranks share the cores, and oneDNN's memory depends on a rank's number of threads.
    ranks = layout.world_size if work.device == "cpu" else 0
    how = ranks, config.sequence, config.activation_checkpointing, splits_backward(config), layout.data_size > 1
    return work.same, work.micro_batch_size, *degrees, *how, tp_rank


@cached(profile_key)
def profile_of(work: Workload, tp_rank: int = 0) -> Profile:
    """Return the profile of a workload's model on the tensor rank `tp_rank`."""
    from gptlite.satellites.plan.probe import record

    return _related(work, lambda other: profile_of(other, tp_rank)) or record(work, tp_rank)


@cached(lambda work, blocks=None: (profile_key(work), blocks))
def halves_of(work: Workload, blocks: range | None = None) -> Halves:
    """Return the profiles of split backward passes in a pipeline; if blocks differ, those of the stage with
    `blocks`."""
    from gptlite.satellites.plan.probe import record_halves

    return _related(work, lambda other: halves_of(other, blocks)) or record_halves(work, blocks)


def _related(work: Workload, of: Callable[[Workload], Any]) -> Any:
    """Return the result of `of` for the model with few blocks, or extrapolated from the micro-batch sizes SIZES; None
    if the workload has to be recorded."""
    if (few := with_blocks(work.model, PARTS + 2)) != work.model:  # at most as many are recorded
        return of(replace(work, model=few))
    linear = work.rank_length >= SHORTEST if work.sample is None else work.device != "cpu"
    if work.micro_batch_size <= SIZES[-1] or not linear:
        return None
    small, large = (of(replace(work, micro_batch_size=size)) for size in SIZES)
    return between(small, large, work.micro_batch_size)


@cached(
    lambda work: (
        work.same,
        work.layout.size("tp"),
        work.layout.folded,
        work.parallelism.sequence,
        work.micro_batch_size,
    )
)
def plain_profile(work: Workload) -> Profile:
    """Return the profile under FSDP2 in a pipeline, without recomputation and split backward passes.

    The time of other layouts is derived from this profile, since the differences are small.
    """
    config = replace(
        work.parallelism, activation_checkpointing=ActivationCheckpointing.none, schedule="1f1b", pipeline=2
    )
    degrees = (2, 1, math.lcm(2 * work.layout.context, work.layout.size(EXPERT)), work.layout.size("tp"))
    work = replace(work, parallelism=config, layout=Layout(degrees, work.layout.folded))
    return profile_of(work.balanced(SETTLED))
