"""The timeline of a cell's pipeline, from what result.json says of it. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptlite.plan.timeline import Timeline

MOST_PASSES = 20_000  # of all ranks; beyond, a timeline takes long and its picture is grey


def timeline_of(pipeline: dict[str, Any], compute: float | None = None) -> Timeline | None:
    """When each pass of a step runs, if messages took no time; None where it cannot be said.

    `pipeline` is result.json's. Passes take time in proportion to their FLOPs: a backward pass twice a forward one,
    three times where it computes the blocks again. `compute`: seconds that a rank computes in a step, on average, to
    which it is scaled; else its unit is the time of a micro-batch in all stages.
    """
    try:
        from gptlite.parallelism.config import ParallelismConfig
        from gptlite.parallelism.layout import SCHEDULES
        from gptlite.plan.timeline import timeline

        ranks, virtual = int(pipeline["ranks"]), int(pipeline["stages_per_rank"])
        schedule, micro_batches = str(pipeline["schedule"]), int(pipeline["micro_batches"])
        flops = [float(each) for each in pipeline["stage_flops"]]
        if 3 * micro_batches * len(flops) > MOST_PASSES or not sum(flops) > 0:
            return None
        fixed = SCHEDULES[schedule].fixed
        config = ParallelismConfig(
            pipeline=ranks, schedule=schedule, virtual_stages=None if fixed else virtual, data=None
        )
        again = pipeline.get("activation_checkpointing") == "full"
        unit = 1 / ((4 if again else 3) * sum(flops))
        if compute is not None and compute > 0:
            unit *= compute * ranks / micro_batches
        forward = [each * unit for each in flops]
        backward = [(3 if again else 2) * each for each in forward]
        return timeline(config, micro_batches, forward, backward, 0.0)
    except Exception:  # a schedule that this version does not know, a file written by another: the report goes on
        return None


def bubble_share(found: Timeline | None) -> float | None:
    """The share of the step that the ranks wait, on average; None without a timeline."""
    if found is None:
        return None
    ranks = sorted({event.rank for event in found.events})
    return sum(found.bubble(rank) for rank in ranks) / len(ranks) if ranks else None


def schedule_words(pipeline: dict[str, Any]) -> str:
    """`1f1b, 2 ranks, 8 micro-batches`."""
    words = [str(pipeline.get("schedule")), f"{pipeline.get('ranks')} ranks"]
    if (stages := pipeline.get("stages_per_rank")) not in (1, None):
        words.append(f"{stages} stages a rank")
    return ", ".join([*words, f"{pipeline.get('micro_batches')} micro-batches"])
