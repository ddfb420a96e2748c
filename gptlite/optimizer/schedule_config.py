"""Configuration of learning-rate schedules."""

from dataclasses import dataclass
from enum import Enum


@dataclass
class ScheduleConfig:
    """Linear warmup over `warmup_steps`, followed by a decay curve. Ratios are relative to `optimizer.lr`."""

    warmup_steps: int | None = 0  # null: a tenth of trainer.max_steps, at most 100


@dataclass
class ConstantConfig(ScheduleConfig):
    """Warmup, then a constant peak rate."""


@dataclass
class CosineConfig(ScheduleConfig):
    """Half a cosine from the peak rate to `min_ratio` of it (arXiv:1608.03983, without restarts)."""

    min_ratio: float = 0.1
    decay_steps: int | None = None  # the step where min_ratio is reached; null: trainer.max_steps


@dataclass
class LinearConfig(ScheduleConfig):
    """Linear decay from the peak rate to `min_ratio` of it."""

    min_ratio: float = 0.0
    decay_steps: int | None = None  # the step where min_ratio is reached; null: trainer.max_steps


@dataclass
class WSDConfig(ScheduleConfig):
    """Warmup-stable-decay (MiniCPM, arXiv:2404.06395): the peak rate, then a linear decay over the last
    `decay_fraction` of `decay_steps`."""

    min_ratio: float = 0.0
    decay_fraction: float = 0.5
    decay_steps: int | None = None  # the step where min_ratio is reached; null: trainer.max_steps


@dataclass
class InverseSqrtConfig(ScheduleConfig):
    """Decay as 1/sqrt(step) from the end of the warmup (Vaswani et al. 2017, arXiv:1706.03762, section 5.3)."""


class WarmupDecay(Enum):
    """Curve after DeepSpeed's warmup: that of WarmupLR, WarmupDecayLR or WarmupCosineLR."""

    none = "none"
    linear = "linear"
    cosine = "cosine"


@dataclass
class WarmupConfig(ScheduleConfig):
    """DeepSpeed's schedulers: a log (or linear) rise from `min_ratio` to the peak rate, then constant or a decay."""

    min_ratio: float = 0.0
    log: bool = True
    decay: WarmupDecay = WarmupDecay.none
    end_ratio: float = 0.0  # rate at the end of the decay, as a fraction of the peak
    decay_steps: int | None = None  # the step where end_ratio is reached; null: trainer.max_steps
    first_ratio: float | None = None  # the rate of an additional first step, as in DeepSpeed's engine; null: none
