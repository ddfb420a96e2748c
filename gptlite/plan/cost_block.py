"""How long a rank computes and waits inside the model on a micro-batch: each op of its profile by a roofline, each
collective by the links it crosses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.parallelism.layout import CONTEXT, Layout
from gptlite.plan.cost_device import Device
from gptlite.plan.cost_links import Links
from gptlite.plan.profile import Op, Profile, Segment, profile_of
from gptlite.plan.workload import Transfer, Workload


class Passes(NamedTuple):
    """Seconds of a micro-batch's forward and backward pass; recomputation is part of the backward one."""

    forward: float = 0.0
    backward: float = 0.0

    def plus(self, other: Passes, times: float = 1) -> Passes:
        """These, and `times` the others."""
        return Passes(self.forward + times * other.forward, self.backward + times * other.backward)


NONE = Passes()


@dataclass(frozen=True)
class Part:
    """A part of a model: seconds of its ops, and of what is sent along the tensor and the context axis."""

    ops: Passes = NONE
    tensor: Passes = NONE
    context: Passes = NONE

    def plus(self, other: Part, times: int = 1) -> Part:
        """This one, and `times` the other."""
        pairs = (self.ops, other.ops), (self.tensor, other.tensor), (self.context, other.context)
        return Part(*(mine.plus(its, times) for mine, its in pairs))


@dataclass(frozen=True)
class ModelSeconds:
    """The beginning of a model, one block and the end."""

    begin: Part
    block: Part
    end: Part


def model_seconds(work: Workload, device: Device, links: Links) -> ModelSeconds:
    """Seconds of a micro-batch, on a rank that has the model alone.

    Of a block that is computed again in the backward pass, full recomputation repeats all ops, selective recomputation
    those whose results it has not kept; both send again what the forward pass did.
    """
    its, mode = plain_profile(work), work.parallelism.activation_checkpointing
    block = _part(its.block, its.block_back, device, links)
    if mode.recomputes:
        selective = mode is ActivationCheckpointing.selective
        again = _seconds((op for op in its.block.ops if not (selective and op.kept)), device)
        repeated = Part(Passes(0.0, again), *(Passes(0.0, each.forward) for each in (block.tensor, block.context)))
        block = block.plus(repeated)
    return ModelSeconds(
        _part(its.begin, its.begin_back, device, links), block, _part(its.end, its.end_back, device, links)
    )


def plain_profile(work: Workload) -> Profile:
    """The profile of a pipeline's part under FSDP2, without recomputation and with whole backward passes: those of
    others follow from it closely enough to be timed."""
    config = replace(
        work.parallelism, activation_checkpointing=ActivationCheckpointing.none, schedule="1f1b", pipeline=2
    )
    degrees = (2, 1, 2 * work.layout.context, work.layout.size("tp"))
    return profile_of(replace(work, parallelism=config, layout=Layout(degrees, work.layout.folded)))


def _part(forward: Segment, backward: Segment, device: Device, links: Links) -> Part:
    both = forward, backward
    tensor, context = (Passes(*(_sent(each, axis, links) for each in both)) for axis in ("tp", CONTEXT))
    return Part(Passes(*(_seconds(each.ops, device) for each in both)), tensor, context)


def _seconds(ops: Iterable[Op], device: Device) -> float:
    return sum(map(device.seconds, ops))


def _sent(segment: Segment, axis: str, links: Links) -> float:
    mine = (each for each in segment.sent if each.axis == axis)
    return sum(links.seconds(Transfer(axis, each.kind, each.ranks, round(each.payload), 1, "")) for each in mine)
