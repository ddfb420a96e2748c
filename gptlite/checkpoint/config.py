"""When checkpoints are written, how many stay, and what a run starts from."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """`resume`: auto (the newest valid one in run.dir), never, or the path of a checkpoint or run.

    `load`: everything, or `weights` (fresh optimizer, schedule and data position).
    `interval: 0` saves only at the end and when stopped; `keep: 0` keeps all; `keep_every: 1000` keeps those of steps
    1000, 2000, ... besides. `async_save`: training goes on while a copy of the state is written. `timeout_seconds` is
    how long a save may take, or a rank wait for the others in one.
    """

    interval: int = 250
    keep: int = 2
    keep_every: int = 0
    async_save: bool = False
    timeout_seconds: float = 1800
    resume: str = "auto"
    load: str = "all"
