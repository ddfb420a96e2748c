"""What a 1-bit optimizer refuses, before anything starts, and the steps that it takes with dense sums."""

from __future__ import annotations

import pytest

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.satellites.onebit.adam import refreshes
from gptlite.satellites.onebit.configs import OneBitAdamConfig

RUN = ["trainer.max_steps=1000", "schedule.warmup_steps=100"]


@pytest.mark.parametrize("optimizer", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.freeze_step=1000"], "optimizer.freeze_step=1000 must be below trainer.max_steps=1000"),
        (["optimizer.freeze_step=0"], "optimizer.freeze_step=0 must be .* at least 1; set optimizer.freeze_step="),
        (
            ["trainer.max_steps=1", "schedule.warmup_steps=0"],
            "trainer.max_steps=1 and .*; use trainer.max_steps=2 or more",
        ),
        (["optimizer.freeze_step=150", "trainer.max_steps=120"], "=120 and at least 1; set optimizer.freeze_step=100$"),
        (
            ["optimizer.freeze_step=99"],
            "optimizer.freeze_step=99 freezes .*; set optimizer.freeze_step=100, or schedule",
        ),
        (["parallelism.zero=2"], "parallelism.zero=2 frees; use parallelism=zero1, or optimizer=adamw"),
        (["parallelism.zero=3"], "parallelism.zero=3 frees"),
        (["parallelism.offload=cpu"], "parallelism.offload=cpu keeps them elsewhere; use parallelism.offload=none"),
        (["model=moe-lite", "parallelism.expert=2", "parallelism.data=2"], "use parallelism.expert=1"),
        (["parallelism.compression=int8", "parallelism.data=2"], "use parallelism.compression=none"),
        (["precision=bf16_stochastic"], "precision.master_weights=false updates parameters one at a time"),
    ],
)
def test_refuses(optimizer: str, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        load([f"optimizer={optimizer}", *RUN, *overrides])


def test_the_warm_up_is_15_percent_of_the_run():
    config = OneBitAdamConfig()
    assert config.completed(1000, 100).freeze_step == 150
    assert config.completed(1000, 200).freeze_step == 200  # covers the learning rate's warm-up


def test_intervals_between_refreshes_double():
    assert refreshes(5) == [1, 2, 3, 4, 5]
    assert refreshes(21, 4) == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20]
