"""When checkpoints are written, how many stay, and what a run starts from."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """`resume`: auto (the newest valid one in run.dir), never, or the path of a checkpoint or run.

    `load`: everything, or `weights` (fresh optimizer, schedule and data position).
    `interval: 0` saves only at the end and when stopped; `keep: 0` keeps all.
    """

    interval: int = 250
    keep: int = 2
    resume: str = "auto"
    load: str = "all"
