"""Settings of saving, retaining and loading checkpoints."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Checkpoint settings.

    `resume`: auto (the newest intact checkpoint in run.dir), never, or the path of a checkpoint or run.
    `load`: all, or weights (with a new optimizer, schedule and data position). `interval: 0` saves only at the end and
    when the run is stopped. `keep: 0` keeps all checkpoints; `keep_every: 1000` also keeps those of step 1000, 2000 and
    so on. `async_save`: training continues while a copy of the state is written. `timeout_seconds` limits the duration
    of a save, and the time that a rank waits for the others during a save.
    """

    interval: int = 250
    keep: int = 2
    keep_every: int = 0
    async_save: bool = False
    memory_interval: int | None = None  # steps between checkpoints in host memory; null: 10 with replicas, else 0, none
    replicas: int = 0  # number of other nodes that hold a copy of a node's checkpoint in memory
    timeout_seconds: float = 1800
    resume: str = "auto"
    load: str = "all"

    @property
    def memory_steps(self) -> int:
        """Steps between checkpoints in host memory; 0: none."""
        return 10 * bool(self.replicas) if self.memory_interval is None else self.memory_interval
