"""Length of a run and what happens during it."""

from dataclasses import dataclass, field


@dataclass
class SpikeConfig:
    """What a run does about spikes of its loss, see trainer/spike.py. Lengths are in steps.

    `policy`: none, or skip: back to the last checkpoint from before the spike, and on without the samples that made it.
    """

    policy: str = "none"
    window: int = 128  # whose losses make the band; none is judged before there are as many
    threshold: float = 8.0  # standard deviations above the band's middle
    rise: float = 0.3  # nats above it, at least
    patience: int = 3  # above the band in a row; a loss that is not finite counts at once
    margin: int = 1  # before these, whose samples are skipped too
    max_rewinds: int = 5  # of the run, which then ends


@dataclass
class TrainerConfig:
    """Steps are optimizer steps. `max_time` is in minutes: the run saves and ends before it is over."""

    max_steps: int = 1000  # of the run and of its schedule
    stop_step: int | None = None  # ends the run after this step of the same schedule; null: max_steps
    max_time: float | None = None  # minutes
    eval_interval: int = 250  # 0: only at the end
    eval_samples: int | None = None  # sequences an evaluation reads of each data set; null: all there are
    log_interval: int = 10
    compile: bool = False
    host_memory_limit: float | None = None  # GiB that a rank may take of the host; past it an allocation fails
    max_restarts: int = 0  # times a run whose rank died goes on from its last checkpoint
    replica_check_interval: int = 0  # steps between comparisons of parameters that should be equal; 0: never
    profile_steps: list[int] = field(default_factory=list)  # [first, last]: writes a Chrome trace of these steps
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    sample_prompt: str = "\n"  # text continued at the end of the run; "" for none
    sample_tokens: int = 200

    @property
    def last_step(self) -> int:
        """The step that the run ends after."""
        return self.max_steps if self.stop_step is None else min(self.stop_step, self.max_steps)
