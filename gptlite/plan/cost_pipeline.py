"""How long a pipeline takes, in closed form: a search asks thousands of times, too often to lay out every pass as
`timeline.py` does, which tests compare this with.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages, rule, stages_of_rank


def pipeline_seconds(
    config: ParallelismConfig, micro_batches: int, forward: Sequence[float], backward: Sequence[float], message: float
) -> float:
    """Seconds of all passes of a step. `forward` and `backward`: of one micro-batch in each stage; `message`: of one
    activation from rank to rank.

    The slowest rank is busy with its passes; before its first and after its last one, the others fill and drain.
    """
    ranks, stages = config.pipeline, len(forward)
    work = busy(config, forward, backward)
    slowest, hop = max(work), 2 * message
    if ranks == 1:
        return micro_batches * slowest
    if config.schedule == "gpipe":
        whole = sum(forward) + sum(backward) + (ranks - 1) * hop
        return whole + (micro_batches - 1) * (max(forward) + max(backward))
    others = (sum(work) - slowest) * ranks / stages  # one stage of each other rank
    if config.schedule == "1f1b":
        # The first rank has as many micro-batches on their way to the end and back as there are ranks.
        there_and_back = (sum(work) + (ranks - 1) * hop) / ranks
        return micro_batches * max(slowest, there_and_back) + others + (ranks - 2) * hop
    busiest = micro_batches * slowest
    if not rule(config).splits_backward:
        return busiest + others + (stages - 1) * hop
    # A third of a stage's work remains, that a W pass of its own cannot fill, and messages as timelines show them.
    if not rule(config).v_shape:
        return busiest + others / 3 + ((stages + 3 * ranks) / 2 - 2) * hop
    unfilled = max(0, 2 * ranks - 1 - micro_batches) / (ranks - 1)
    return busiest + others / 3 * (1 + unfilled) + (2.5 * ranks - 3.5) * hop


def busy(config: ParallelismConfig, forward: Sequence[float], backward: Sequence[float]) -> list[float]:
    """Seconds that each pipeline rank computes on one micro-batch."""
    stages = [stages_of_rank(config, rank) for rank in range(config.pipeline)]
    assert sum(map(len, stages)) == num_stages(config) == len(forward) == len(backward)
    return [sum(forward[stage] + backward[stage] for stage in mine) for mine in stages]
