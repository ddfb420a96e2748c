"""Memory of a pipeline's messages: what a rank receives into, and what it holds of what it sends."""

from __future__ import annotations

from gptlite.parallelism.layout import splits_backward
from gptlite.satellites.plan.parameters import StageParameters
from gptlite.satellites.plan.traffic import message_bytes
from gptlite.satellites.plan.workload import Workload, frees_messages


def pass_bytes(work: Workload, kind: str, number: int, mine: set[int]) -> tuple[int, int]:
    """Return the bytes of messages to add to those recorded at the peak of a pass and as left after it.

    Up to torch 2.14, schedules with several stages per rank hold sent tensors to the end of the step, when they wait
    for their sends. If two consecutive stages are on the same rank, the first one's output is the receive buffer that
    `buffer_bytes` counts.
    """
    if work.layout.size("pp") == 1:
        return 0, 0
    before, after = message_bytes(work, number), message_bytes(work, number + 1)
    if frees_messages():
        sent = before * (number - 1 not in mine), after * (number + 1 not in mine)
        return _freed(kind, *sent, kept=work.parallelism.schedule != "1f1b")
    if number + 1 in mine:
        return 0, {"F": -after, "B": after, "W": after}.get(kind, 0)
    if work.parallelism.schedule in ("gpipe", "1f1b") or kind in "FI":
        return 0, 0
    # `buffer_bytes` counts the input's gradient of a split backward pass, which is always kept.
    return 0, after + before * (kind == "B" and number - 1 not in mine)


def _freed(kind: str, before: int, after: int, kept: bool) -> tuple[int, int]:
    """Return `pass_bytes` for torch 2.15 and later, where a buffer is allocated when its message is awaited, and an
    input is freed by the pass that computes the weights' gradients.

    `before`, `after`: bytes of the messages that a forward pass receives and sends. `kept`: the gradients that a stage
    sends are held to the end of the step.
    """
    match kind:
        case "F":
            return before, before
        case "I":
            return after, after + before
        case "W":
            return 0, -before - after
        case _:
            return after, before * kept - before


def buffer_bytes(work: Workload, held: list[StageParameters]) -> int:
    """Return the bytes of a pipeline's receive buffers, one tensor per micro-batch, and of the step's inputs and
    targets. 0 without a pipeline."""
    ranks, count = work.layout.size("pp"), work.micro_batches
    if ranks == 1:
        return 0
    numbers, split = {stage.number for stage in held}, splits_backward(work.parallelism)
    if frees_messages():
        ahead = 0  # a gradient that is being sent, or an input received ahead
        if not split and work.parallelism.schedule != "gpipe":
            ahead = max(message_bytes(work, number) for number in numbers)
        return ahead + count * (work.target_bytes + work.input_bytes * (0 in numbers))
    ends = [message_bytes(work, each) for number in numbers for each in (number, number + 1)]
    kept = count * sum(ends)
    if split:  # a stage that receives from another rank keeps its inputs' gradients to the end of the step
        kept += count * sum(message_bytes(work, number) for number in numbers if number - 1 not in numbers)
    if work.parallelism.schedule == "1f1b" and count > ranks - held[0].number:
        kept += sum(ends)  # the steady phase holds an output and a gradient that have been sent
    return kept + count * (work.target_bytes + work.input_bytes * (0 in numbers))
