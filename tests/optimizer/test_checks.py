"""Every value that could not train is refused by a line that names the key, the value and the fix."""

import subprocess
import sys

import pytest

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.optimizer.checks import check_optimizer
from gptlite.optimizer.config import AdamConfig, AdamWConfig, MuonConfig, SGDConfig
from gptlite.optimizer.schedule_config import CosineConfig, InverseSqrtConfig, LinearConfig, WarmupConfig, WSDConfig
from gptlite.satellites.optimizers.configs import AdafactorConfig, LambConfig, LionConfig

REFUSED_OPTIMIZERS = [
    (AdamWConfig(lr=0.0), "optimizer.lr=0.0 must be above 0"),
    (AdamWConfig(lr=-1e-3), "optimizer.lr=-0.001"),
    (AdamWConfig(lr=float("nan")), "optimizer.lr=nan"),
    (AdamWConfig(lr=float("inf")), "optimizer.lr=inf"),
    (AdamWConfig(weight_decay=-0.1), "optimizer.weight_decay=-0.1"),
    (AdamWConfig(clip_norm=-1.0), "optimizer.clip_norm=-1.0"),
    (AdamWConfig(beta1=1.0), r"optimizer.beta1=1.0 must be in \[0, 1\)"),
    (AdamConfig(beta2=-0.1), "optimizer.beta2=-0.1"),
    (AdamConfig(eps=0.0), "optimizer.eps=0.0"),
    (SGDConfig(momentum=1.5), "optimizer.momentum=1.5"),
    (SGDConfig(momentum=0.0, nesterov=True), "optimizer.nesterov=true needs a momentum"),
    (LambConfig(beta2=1.0), "optimizer.beta2=1.0"),
    (LambConfig(eps=0.0), "optimizer.eps=0.0"),
    (LambConfig(min_trust=-1.0), "optimizer.min_trust=-1.0"),
    (LambConfig(min_trust=0.5, max_trust=0.1), "optimizer.max_trust=0.1 must be above 0 and at least"),
    (LionConfig(beta1=-1.0), "optimizer.beta1=-1.0"),
    (MuonConfig(momentum=1.0), "optimizer.momentum=1.0"),
    (MuonConfig(beta1=1.0), "optimizer.beta1=1.0"),
    (MuonConfig(newton_schulz_steps=0), "optimizer.newton_schulz_steps=0 must be from 1 to 100"),
    (MuonConfig(adamw_lr_ratio=0.0), "optimizer.adamw_lr_ratio=0.0 must be above 0"),
    (AdafactorConfig(decay=0.0), "optimizer.decay=0.0 must be above 0"),
    (AdafactorConfig(clip_threshold=0.0), "optimizer.clip_threshold=0.0"),
    (AdafactorConfig(eps1=0.0), "optimizer.eps1=0.0 must be 1e-37 or more"),
    (AdafactorConfig(eps2=0.0), "optimizer.eps2=0.0"),
]

REFUSED_SCHEDULES = [
    (CosineConfig(warmup_steps=-1), "schedule.warmup_steps=-1"),
    (CosineConfig(warmup_steps=100), "schedule.warmup_steps=100 .*max_steps=100; set schedule.warmup_steps=10"),
    (InverseSqrtConfig(warmup_steps=2000), "schedule.warmup_steps=2000"),
    (CosineConfig(min_ratio=1.5), "schedule.min_ratio=1.5"),
    (LinearConfig(min_ratio=-0.1), "schedule.min_ratio=-0.1"),
    (WarmupConfig(min_ratio=10), "schedule.min_ratio=10"),
    (WarmupConfig(end_ratio=-1), "schedule.end_ratio=-1"),
    (WarmupConfig(decay_steps=50), "schedule.decay_steps=50 .*; set .* or schedule.end_ratio=0.1"),
    (WSDConfig(decay_fraction=0.0), "schedule.decay_fraction=0.0"),
    (WSDConfig(decay_fraction=1.1), "schedule.decay_fraction=1.1"),
    (CosineConfig(warmup_steps=10, decay_steps=10), "schedule.decay_steps=10 must be above schedule.warmup_steps=10"),
    (CosineConfig(decay_steps=0), "schedule.decay_steps=0"),
    (LinearConfig(decay_steps=50), "schedule.decay_steps=50 leaves a rate of 0 until trainer.max_steps=100"),
]

ACCEPTED_SCHEDULES = [
    CosineConfig(warmup_steps=None),
    CosineConfig(warmup_steps=99, min_ratio=0.0),
    CosineConfig(warmup_steps=10, decay_steps=50),  # ends early, at a rate that still learns
    WSDConfig(warmup_steps=10, decay_steps=1000),  # a run that stops before its decay
    LinearConfig(warmup_steps=0, decay_steps=100),
    WSDConfig(warmup_steps=50, decay_fraction=1.0),
]


@pytest.mark.parametrize("steps", [1, 100])
def test_the_limits_of_a_range_are_accepted(steps):
    load(["optimizer=muon", f"optimizer.newton_schulz_steps={steps}"])


@pytest.mark.parametrize(("optimizer", "message"), REFUSED_OPTIMIZERS)
def test_optimizer_is_refused(optimizer, message):
    with pytest.raises(ConfigError, match=message):
        check_optimizer(optimizer, CosineConfig(), max_steps=100)


@pytest.mark.parametrize(("schedule", "message"), REFUSED_SCHEDULES)
def test_schedule_is_refused(schedule, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_optimizer(AdamWConfig(), schedule, max_steps=100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("schedule", ACCEPTED_SCHEDULES)
@pytest.mark.parametrize("optimizer", [AdamWConfig(), AdamConfig(), SGDConfig(), AdamWConfig(clip_norm=0.0)])
def test_legal_values_pass(optimizer, schedule):
    check_optimizer(optimizer, schedule, max_steps=100)


@pytest.mark.parametrize("max_steps", [0, 1, 5])
def test_a_tiny_run_needs_no_override(max_steps):
    check_optimizer(AdamWConfig(), CosineConfig(warmup_steps=None), max_steps)


def test_checking_does_not_import_torch():
    code = "import sys, gptlite.optimizer.checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
