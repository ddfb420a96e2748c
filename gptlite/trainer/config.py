"""Trainer configuration: length of a run, intervals, profiling and loss spikes."""

from dataclasses import dataclass, field


@dataclass
class SpikeConfig:
    """Handling of loss spikes, see trainer/spike.py. Lengths are in steps.

    `policy`: none, or skip, which returns to the last checkpoint before the spike and continues without its samples.
    """

    policy: str = "none"
    window: int = 128  # losses that define the band; there are no spikes before that many steps
    threshold: float = 8.0  # standard deviations from the band's middle to its upper limit
    rise: float = 0.3  # minimum distance in nats from the middle to the limit
    patience: int = 3  # consecutive losses above the band that make a spike; a non-finite loss is one at once
    margin: int = 1  # steps before the spike whose samples are skipped too
    max_rewinds: int = 5  # maximum per run, which then fails


@dataclass
class TrainerConfig:
    """Steps are optimizer steps. `max_time` is in minutes; the run saves and ends before it is over."""

    max_steps: int = 1000  # of the run and of its schedule
    max_epochs: float | None = None  # sets max_steps to as many passes over the training data; null: max_steps as given
    stop_step: int | None = None  # ends the run after this step of the same schedule; null: max_steps
    max_time: float | None = None  # minutes
    eval_interval: int = 250  # 0: only at the end
    eval_samples: int | None = None  # sequences an evaluation reads of each data set; null: all there are
    log_interval: int = 10
    compile: bool = False
    host_memory_limit: float | None = None  # GiB of host memory per rank; allocations beyond it fail
    max_restarts: int = 0  # restarts from the last checkpoint after a rank has failed
    replica_check_interval: int = 0  # steps between comparisons of parameters that should be equal; 0: never
    profile_steps: list[int] = field(default_factory=list)  # [first, last]: writes a Chrome trace of these steps
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    sample_prompt: str = "\n"  # text continued at the end of the run; "" for none
    sample_tokens: int = 200

    @property
    def doubled(self) -> str:
        """The override that doubles the length of the run."""
        if self.max_epochs is not None:
            return f"trainer.max_epochs={2 * self.max_epochs:g}"
        return f"trainer.max_steps={2 * self.max_steps}"

    @property
    def last_step(self) -> int:
        """The step that the run ends after."""
        return self.max_steps if self.stop_step is None else min(self.stop_step, self.max_steps)
