"""Trainer configuration: length of a run, intervals, profiling and loss spikes."""

from collections.abc import Callable
from dataclasses import dataclass, field

# Modules whose `build_noise(config, mesh, state)` returns a GradientNoise, and whether a configuration asks for it.
# Global on purpose: a plug-in adds its module when it is imported.
NOISES: list[tuple[str, Callable[..., bool]]] = []


@dataclass
class SpikeConfig:
    """Handling of loss spikes, see trainer/spike.py. `window`, `patience` and `margin` are in steps.

    `policy` is "none" or "skip". With "skip", the run returns to the last checkpoint before a spike and continues
    without its samples. The band is the range of normal losses, computed from the last `window` losses.
    """

    policy: str = "none"
    window: int = 128  # number of losses that define the band; no spike is detected before this many steps
    threshold: float = 8.0  # standard deviations from the median loss to the upper limit of the band
    rise: float = 0.3  # minimum distance in nats from the median to the limit
    patience: int = 3  # consecutive losses above the band that count as a spike; one non-finite loss is enough
    margin: int = 1  # number of steps before the spike whose samples are also skipped
    max_rewinds: int = 5  # rewinds per run; the next spike ends the run with an error


@dataclass
class TrainerConfig:
    """Length of a run and intervals, in optimizer steps. With `max_time`, the run saves and ends before the limit."""

    max_steps: int = 1000  # length of the run and of its learning-rate schedule
    max_epochs: float | None = None  # passes over the training data; replaces max_steps unless null
    stop_step: int | None = None  # last step of the run, without a change of the schedule; null: max_steps
    max_time: float | None = None  # minutes
    eval_interval: int = 250  # 0: only at the end
    eval_samples: int | None = None  # maximum number of sequences per validation set; null: all
    log_interval: int = 10  # steps between two rows of metrics.jsonl; slow steps have further lines on the terminal
    noise_scale: bool = False  # estimate the gradient noise scale for the metrics: docs/adascale.md
    compile: bool = False  # compile the model's blocks with torch.compile
    cuda_graph: str = "auto"  # replay steps on one GPU from a CUDA graph if possible; false: never
    host_memory_limit: float | None = None  # GiB of host memory per rank; allocations beyond it fail
    max_restarts: int = 0  # maximum number of restarts from the last checkpoint after a rank fails
    gc_freq: int = 50  # steps between collections by Python's garbage collector, otherwise off; 0: as Python chooses
    on_divergence: str = "stop"  # if copies differ: stop, or restore a checkpoint from before: docs/elastic.md
    replica_check_interval: int = 0  # steps between checks that parameter copies are equal on all ranks; 0: never
    profile_steps: list[int] = field(default_factory=list)  # [first, last]: writes a Chrome trace of these steps
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    sample_prompt: str = "\n"  # prompt of the sample printed at the end of the run; "" for no sample
    sample_tokens: int = 200  # maximum length of the sample; 0 for no sample

    @property
    def doubled(self) -> str:
        """Configuration override that doubles the length of the run."""
        if self.max_epochs is not None:
            return f"trainer.max_epochs={2 * self.max_epochs:g}"
        return f"trainer.max_steps={2 * self.max_steps}"

    @property
    def last_step(self) -> int:
        """Number of the last step of the run."""
        return self.max_steps if self.stop_step is None else min(self.stop_step, self.max_steps)
