"""What the planner says of a cell before it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from gptlite.config import Config
from gptlite.errors import ConfigError
from gptlite.parallelism.layout import Layout


def predicted(config: Config, layout: Layout) -> dict[str, Any] | None:
    """The fields of the plan's Prediction for a run on `cluster`; None where the plan knows too little of that.

    `assumed`: the vocabulary, where it is a guess, and why.
    """
    from gptlite.plan.cost import predict
    from gptlite.plan.local import this_machine
    from gptlite.planning import given_keys, vocabulary_of, with_planned_vocabulary, workload_of

    try:
        cluster = this_machine(config.cluster, _unsaid, given=given_keys(config, "cluster"))
        sized, assumed = with_planned_vocabulary(config, _unsaid)
        found = dataclasses.asdict(predict(workload_of(sized, layout, cluster), cluster))
    except ConfigError:
        return None
    return found | ({"assumed": f"vocabulary of {vocabulary_of(sized.model)}: {assumed}"} if assumed else {})


def _unsaid(text: str) -> None:
    """How to measure the machine is for who asks for a plan."""
