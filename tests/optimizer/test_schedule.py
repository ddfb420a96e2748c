"""Schedules against the formulas they are published with, and against torch's own schedulers."""

import math
from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler

from gptlite.optimizer.schedule import Schedule, set_lr
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

STEPS, WARMUP = 50, 10
EVERY_SHAPE = [ConstantConfig, CosineConfig, LinearConfig, WSDConfig, InverseSqrtConfig, WarmupConfig]


def curve(config: ScheduleConfig, steps: int = STEPS) -> list[float]:
    schedule = Schedule(config, steps)
    return [schedule.factor(step) for step in range(steps)]


def torch_curve(decay) -> list[float]:
    """What torch's schedulers give: a LinearLR warmup, then `decay(optimizer)`."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=1 / (WARMUP + 1), total_iters=WARMUP)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, decay(optimizer)], milestones=[WARMUP])
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


REST = STEPS - WARMUP
TORCHS = [
    (CosineConfig(min_ratio=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=REST, eta_min=0.1)),
    (LinearConfig(min_ratio=0.2), lambda o: lr_scheduler.LinearLR(o, 1.0, end_factor=0.2, total_iters=REST)),
    (ConstantConfig(), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
]


@pytest.mark.parametrize(("config", "decay"), TORCHS)
def test_after_a_linear_warmup_it_is_torchs(config, decay):
    assert curve(replace(config, warmup_steps=WARMUP)) == pytest.approx(torch_curve(decay), rel=1e-9)


def test_wsd_is_flat_then_falls_in_a_line():
    rates = curve(WSDConfig(warmup_steps=WARMUP, decay_fraction=0.2, min_ratio=0.0))
    assert rates[WARMUP:41] == [1.0] * 31
    assert rates[40:] == pytest.approx([1 - i / 10 for i in range(10)])


def test_wsd_decay_starts_no_earlier_than_the_warmup_ends():
    rates = curve(WSDConfig(warmup_steps=WARMUP, decay_fraction=1.0))
    assert max(rates) == rates[WARMUP] == 1.0
    assert rates == pytest.approx(curve(LinearConfig(warmup_steps=WARMUP)))


def test_inverse_sqrt_is_the_transformer_formula():
    # Vaswani et al. 2017, equation 3, counts steps from 1; the scale d_model^-0.5 is divided out by its peak.
    ramp = WARMUP + 1
    published = [min(t**-0.5, t * ramp**-1.5) for t in range(1, STEPS + 1)]
    assert curve(InverseSqrtConfig(warmup_steps=WARMUP)) == pytest.approx([r / max(published) for r in published])


def test_warmup_is_deepspeed_warmup_lr():
    # The values of WarmupLR(warmup_num_steps=4, warmup_min_lr=0.2, warmup_max_lr=1.0).step(i) for i = 0, 1, 2, ...
    log = curve(WarmupConfig(warmup_steps=4, min_ratio=0.2, log=True), steps=6)
    assert log == pytest.approx([0.2, 0.6, 0.2 + 0.8 * math.log(3) / math.log(4), 1.0, 1.0, 1.0])
    linear = curve(WarmupConfig(warmup_steps=4, min_ratio=0.2, log=False), steps=6)
    assert linear == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_decays_are_deepspeeds():
    # WarmupDecayLR(8, warmup_num_steps=4, warmup_min_lr=0.2, warmup_max_lr=1.0), iterations 4 to 9
    linear = WarmupConfig(warmup_steps=4, min_ratio=0.2, decay=WarmupDecay.linear, end_ratio=0.2, decay_steps=8)
    assert curve(linear, steps=10)[4:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    # WarmupCosineLR(8, warmup_num_steps=4, cos_min_ratio=0.1)
    cosine = WarmupConfig(warmup_steps=4, decay=WarmupDecay.cosine, end_ratio=0.1, decay_steps=8)
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * p)) for p in (0.25, 0.5, 0.75, 1, 1, 1)]
    assert curve(cosine, steps=10)[4:] == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [0, 1])
def test_warmup_of_no_or_one_step_divides_by_nothing(warmup):
    expected = [1.0, 1.0, 1.0] if warmup == 0 else [0.5, 1.0, 1.0]
    assert curve(WarmupConfig(warmup_steps=warmup, min_ratio=0.5, log=True), steps=3) == expected


@pytest.mark.parametrize("shape", EVERY_SHAPE)
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_every_shape_rises_to_its_peak_and_never_rises_again(shape, warmup):
    rates = curve(shape(warmup_steps=warmup))
    assert rates[warmup] == max(rates) == 1.0
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert min(rates) >= 0


@pytest.mark.parametrize("shape", [ConstantConfig, CosineConfig, LinearConfig, WSDConfig, InverseSqrtConfig])
def test_no_step_of_a_run_is_wasted_at_rate_0(shape):
    assert min(curve(shape(warmup_steps=WARMUP))) > 0


@pytest.mark.parametrize("shape", [CosineConfig, LinearConfig, WSDConfig])
def test_decay_ends_at_decay_steps_and_stays(shape):
    schedule = Schedule(shape(warmup_steps=5, min_ratio=0.25, decay_steps=30), max_steps=STEPS)
    assert schedule.factor(29) > 0.25
    assert [schedule.factor(step) for step in (30, 31, 49, 1000)] == [0.25] * 4


def test_a_decay_of_no_steps_divides_by_nothing():
    schedule = Schedule(WSDConfig(decay_fraction=0.01, min_ratio=0.5), max_steps=5)
    assert [schedule.factor(step) for step in (4, 5)] == [1.0, 0.5]


@pytest.mark.parametrize(("max_steps", "expected"), [(5, 0), (200, 20), (1000, 100), (100_000, 100)])
def test_null_warmup_is_a_tenth_of_the_run_at_most_100(max_steps, expected):
    assert Schedule(CosineConfig(warmup_steps=None), max_steps).warmup_steps == expected


def test_set_lr_reaches_every_group():
    weight, bias = torch.zeros(2, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.5}], lr=1.0)
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_a_new_shape_without_a_curve_is_an_error():
    with pytest.raises(TypeError, match="no curve for ScheduleConfig"):
        Schedule(ScheduleConfig(), STEPS).factor(0)
