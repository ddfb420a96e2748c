"""Learning-rate schedules: the rate of each optimizer step, as a fraction of the peak.

A schedule is a pure function of the step number. A checkpoint therefore stores no schedule state, and a resumed run
continues on the same curve. This module does not import torch, so that schedules can be checked and plotted without it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gptlite.optimizer.schedule_config import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    ScheduleConfig,
    WarmupConfig,
    WarmupDecay,
    WSDConfig,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

DEFAULT_WARMUP_STEPS = 100


class Schedule:
    """Curve of `config` over a run of `max_steps` optimizer steps.

    With W = `warmup_steps` and D = `decay_steps` (the end of the decay, by default `max_steps`), the warmup is (step +
    1) / (W + 1) for step < W. The first step therefore has a rate above 0, and step W is the first at the peak. The
    decay reaches `min_ratio` at step D, one past the last step of a run that ends there, so a decay to 0 has no step
    at rate 0. After D the rate is constant. DeepSpeed's schedules (`WarmupConfig`) differ in the first and last steps.

    docs/schedules.md has a plot and the formula of each schedule.
    """

    def __init__(self, config: ScheduleConfig, max_steps: int) -> None:
        self.config = config
        self.max_steps = max_steps
        self.warmup_steps = resolve_warmup_steps(config, max_steps)

    def factor(self, step: int) -> float:
        """Return the rate of optimizer step `step`, counted from 0, as a fraction of the peak rate (0 to 1)."""
        config, warmup = self.config, self.warmup_steps
        if isinstance(config, WarmupConfig):
            if config.first_ratio is not None:
                if step == 0:
                    return config.first_ratio
                step -= 1
            return _deepspeed(step, warmup, self._decay_end(), config)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        match config:
            case ConstantConfig():
                return 1.0
            case CosineConfig(min_ratio=low):
                return low + (1 - low) * (1 + math.cos(math.pi * _progress(step, warmup, self._decay_end()))) / 2
            case LinearConfig(min_ratio=low):
                return 1 - (1 - low) * _progress(step, warmup, self._decay_end())
            case WSDConfig(min_ratio=low):
                end = self._decay_end()
                start = max(warmup, end - round(config.decay_fraction * end))
                return 1 - (1 - low) * _progress(step, start, end)
            case InverseSqrtConfig():
                return math.sqrt((warmup + 1) / (step + 1))  # 1 at the end of the warmup
        raise TypeError(f"no curve for {type(config).__name__}: add a case to Schedule.factor")

    def _decay_end(self) -> int:
        steps = getattr(self.config, "decay_steps", None)
        return self.max_steps if steps is None else steps


def resolve_warmup_steps(config: ScheduleConfig, max_steps: int) -> int:
    """Return the length of the warmup: the configured one, or if that is null a tenth of the run, at most 100 steps."""
    if config.warmup_steps is None:
        return min(DEFAULT_WARMUP_STEPS, max_steps // 10)
    return config.warmup_steps


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group. If it is a tensor, which a CUDA graph reads, fill it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], int | float):
            group["lr"] = lr
        else:
            group["lr"].fill_(lr)


def _progress(step: int, start: int, end: int) -> float:
    """Return the fraction of [start, end] before `step`: 0 up to the start, 1 from the end on."""
    if step >= end:
        return 1.0
    return (step - start) / (end - start) if step > start else 0.0


def _deepspeed(step: int, warmup: int, end: int, config: WarmupConfig) -> float:
    """Return the factor of DeepSpeed's schedulers. In a warmup, the factor of step 0 is `min_ratio`, which may be 0."""
    if step < warmup:
        # Like DeepSpeed, treat a logarithmic warmup of one step as two, since log(1) = 0 cannot be a divisor.
        curve = math.log(step + 1) / math.log(max(2, warmup)) if config.log else step / warmup
        return config.min_ratio + (1 - config.min_ratio) * curve
    low = config.end_ratio
    match config.decay:
        case WarmupDecay.none:
            return 1.0
        case WarmupDecay.linear:
            return 1 - (1 - low) * _progress(step, warmup, end)
        case WarmupDecay.cosine:  # in DeepSpeed, one step ahead of the linear decay
            return low + (1 - low) * (1 + math.cos(math.pi * _progress(step + 1, warmup, end))) / 2
