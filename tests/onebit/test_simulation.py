"""Runs of the 1-bit optimizers against simulations in float64 of all workers."""

from __future__ import annotations

import numpy as np
import pytest
from distributed.cells.run import Ranks
from numpy.typing import NDArray

from gptlite.config import Config, load
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.compressed.sums import all_reduce_bytes
from gptlite.satellites.onebit.adam import refreshes
from onebit.cases import Seen
from onebit.simulation import Rule, Simulation, norm_of

STEPS, FREEZE = 40, 8
# 37 tokens are padded to 64 rows, which always have gradients of 0, as have positions behind the 16th.
RUN = """
data=synthetic data.vocab_size=37 data.num_tokens=20000 data.global_batch_size=8 data.micro_batch_size=2
data.sequence_length=16 model=gpt-lite model.num_layers=2 model.num_heads=4 model.d_model=16 model.sequence_length=20
model.dropout=0 trainer.max_steps=1000 optimizer.clip_norm=0.5
optimizer.weight_decay=1 schedule=constant schedule.warmup_steps=4 run.dir=unused run.name=onebit
""".split()


def config(optimizer: str, *more: str) -> Config:
    rate = [] if "lamb" in optimizer else ["optimizer.lr=1e-3", "optimizer.beta2=0.99"]
    freeze = [f"optimizer.freeze_step={FREEZE}"] if "one" in optimizer else []
    return load([f"optimizer={optimizer}", *RUN, *rate, *freeze, *more])


def rule(config: Config) -> Rule:
    its = config.optimizer
    scaler = getattr(its, "var_update_scaler", None)
    values = its.lr, its.weight_decay, its.beta1, its.beta2, its.eps, its.clip_norm
    return Rule(*values, refreshes(FREEZE, scaler), lamb=hasattr(its, "factor_min"))


def compare(config: Config, ranks: list[Seen], means: list[dict[str, float]]) -> None:
    """Compares the ranks that exchange the same values with a simulation of each vector of theirs.

    A sum that is nearly 0 may have another sign in float64, after which all values of its block differ. So the
    simulation takes each step from the values of the run, in which two elements may have another sign. `means`: those
    of the second moments of whole parameters after each step.
    """
    ranks = sorted(ranks, key=lambda each: each.lane)
    for names in ranks[0].vectors:
        simulation = Simulation(rule(config), len(ranks), {name: ranks[0].first[name] for name in names})
        apart = {name: np.zeros_like(x) for name, x in simulation.x.items()}  # of what is sent and the true sums
        for step, (_, norm, lr) in enumerate(ranks[0].results):
            former = {name: state["m"] for name, state in simulation.state.items()}
            simulation.means = means[step]
            simulation.take([each.gradients[step] for each in ranks], lr, norm)
            ties = 0
            for name in names:
                ties += differing(ranks[0].after[step]["m"][name], simulation.state[name]["m"])
                simulation.state[name]["m"] = ranks[0].after[step]["m"][name]
                x, now = simulation.x[name], ranks[0].after[step]["x"][name]
                moved = np.abs(now - (ranks[0].after[step - 1]["x"] if step else ranks[0].first)[name]).max()
                for each in ranks:  # ulps of x are large beside its steps
                    ties += differing(each.after[step]["x"][name], x, moved + 2e-3 * np.abs(x).max())
                simulation.x[name] = now
            if step + 1 not in simulation.rule.dense:
                for name, m in former.items():
                    gradient = sum(each.gradients[step][name] for each in ranks) * simulation.rule.factor(norm)
                    sent, beta1 = ranks[0].after[step]["m"][name], simulation.rule.beta1
                    more = (sent - beta1 * m - (1 - beta1) * gradient) * (sent != 0)
                    apart[name] += more / simulation.roots(name)
                for each, errors in zip(ranks, simulation.errors(), strict=True):
                    ties += sum(differing(each.after[step]["errors"][name], errors[name]) for name in names)
                simulation.set_errors([each.after[step]["errors"] for each in ranks])
            assert ties <= 2 * (2 + 2 * len(ranks)), (step, names)
        for name in names:
            kept = sum(each.after[-1]["errors"][name] for each in ranks)
            assert np.abs(apart[name] + kept).max() <= 1e-5 * np.abs(kept).max(), name


def differing(value: NDArray, expected: NDArray, largest: float = 0.0) -> int:
    """The number of elements that differ by more than 1e-4 of the largest value."""
    return int((np.abs(value - expected) > 1e-4 * (largest or np.abs(expected).max())).sum())


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("optimizer", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_two_ranks_take_the_steps_of_the_simulation(two: Ranks, optimizer: str, zero: int):
    run = config(optimizer, "parallelism.data=2", f"parallelism.zero={zero}")
    ranks = two.run("onebit.cases:steps", run, STEPS, timeout=200)
    compare(run, ranks, [{}] * STEPS)
    dense = rule(run).dense
    for step in range(STEPS):
        norm = norm_of([each.gradients[step] for each in ranks], step + 1 in dense)
        assert ranks[0].results[step][1] == pytest.approx(norm, rel=1e-5)
    (names,) = ranks[0].vectors
    blocks = sum(-(-ranks[0].first[name].size // 1024) for name in names)
    sent = all_reduce_bytes(CODECS["sign"], -(-blocks // 2), 2)
    assert ranks[0].sent == [0 if step + 1 in dense else sent for step in range(STEPS)]
    for name, rows in (("token_embedding.weight", 37), ("position_embedding.weight", 16)):
        assert not np.any(ranks[0].after[-1]["m"][name][rows:])
        assert not any(np.any(each.after[-1]["errors"][name][rows:]) for each in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("onebit_adam", "data=4"),
        ("onebit_lamb", "data=4 zero=1"),
        ("zero_one_adam", "data=4 zero=1"),
        ("onebit_adam", "data=2 tensor=2"),
        ("onebit_adam", "data=2 tensor=2 zero=1 sequence=true"),
        ("onebit_adam", "data=2 pipeline=2"),
        ("onebit_adam", "data=2 pipeline=2 zero=1"),
        ("onebit_adam", "data=4 dp_replicate=2 zero=1"),
        ("onebit_lamb", "data=2 pipeline=2 zero=1"),
    ],
)
def test_four_ranks_take_the_steps_of_the_simulation(four: Ranks, optimizer: str, layout: str):
    words = [f"parallelism.{word}" for word in layout.split()]
    run = config(optimizer, *words)
    ranks = four.run("onebit.cases:steps", run, STEPS, timeout=300)
    lines: dict[str, list[Seen]] = {}
    for each in ranks:  # those that exchange the same parts of parameters
        lines.setdefault(each.line, []).append(each)
    for line in lines.values():
        compare(run, line, ranks[0].mean)
