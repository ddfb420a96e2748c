"""Runs of the 1-bit optimizers against simulations in float64 of all workers."""

from __future__ import annotations

import numpy as np
import pytest
from distributed.cells.run import Ranks

from gptlite.config import Config, load
from gptlite.satellites.onebit.adam import refreshes
from onebit.cases import Seen
from onebit.simulation import Rule, Simulation, norm_of

STEPS, FREEZE = 40, 8
# 37 tokens are padded to 64 rows, which always have gradients of 0, as have positions behind the 16th.
RUN = f"""
data=synthetic data.vocab_size=37 data.num_tokens=20000 data.global_batch_size=8 data.micro_batch_size=2
data.sequence_length=16 model=gpt-lite model.num_layers=2 model.num_heads=4 model.d_model=32 model.sequence_length=20
model.dropout=0 trainer.max_steps=1000 optimizer.freeze_step={FREEZE} optimizer.clip_norm=0.5
optimizer.weight_decay=1 schedule=constant schedule.warmup_steps=4 run.dir=unused run.name=onebit
""".split()


def config(optimizer: str, *more: str) -> Config:
    rate = [] if "lamb" in optimizer else ["optimizer.lr=1e-3"]
    return load([f"optimizer={optimizer}", *RUN, *rate, *more])


def rule(config: Config) -> Rule:
    its = config.optimizer
    scaler = getattr(its, "var_update_scaler", None)
    values = its.lr, its.weight_decay, its.beta1, its.beta2, its.eps, its.clip_norm
    return Rule(*values, refreshes(FREEZE, scaler), lamb=hasattr(its, "factor_min"))


def compare(config: Config, ranks: list[Seen], tolerance: float = 2e-5) -> None:
    """Compares the ranks that exchange the same values with a simulation of each vector of theirs."""
    ranks = sorted(ranks, key=lambda each: each.lane)
    for names in ranks[0].vectors:
        simulation = Simulation(rule(config), len(ranks), {name: ranks[0].first[name] for name in names})
        for step, (_, norm, lr) in enumerate(ranks[0].results):
            simulation.take([each.gradients[step] for each in ranks], lr, norm)
        for name in names:
            moved = np.abs(ranks[0].first[name] - ranks[0].last[name]).max()
            assert moved > 0
            for each in ranks:
                assert np.abs(each.last[name] - simulation.x[name]).max() <= tolerance * moved, name
            m = simulation.state[name]["m"]
            assert np.abs(ranks[0].momenta[name] - m).max() <= 1e-4 * np.abs(m).max(), name
        for each, errors in zip(ranks, simulation.errors(), strict=True):
            for name in names:
                assert np.abs(each.errors[name] - errors[name]).max() <= 1e-4 * np.abs(errors[name]).max(), name


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("optimizer", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_two_ranks_take_the_steps_of_the_simulation(two: Ranks, optimizer: str, zero: int):
    run = config(optimizer, "parallelism.data=2", f"parallelism.zero={zero}")
    ranks = two.run("onebit.cases:steps", run, STEPS)
    compare(run, ranks)
    dense = rule(run).dense
    for step in range(STEPS):
        norm = norm_of([each.gradients[step] for each in ranks], step + 1 in dense)
        assert ranks[0].results[step][1] == pytest.approx(norm, rel=1e-5)
