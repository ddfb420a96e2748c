"""0/1 Adam with steps that exchange nothing, against a simulation in float64 of all workers, and in whole runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from distributed.cells.run import Ranks
from distributed.cells.steps import built

from gptlite.config import Config, load
from gptlite.errors import ConfigError
from gptlite.models.model import Model
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.satellites.compressed.sums import all_reduce_bytes
from gptlite.satellites.monitor.replicas import ReplicaCheck, ReplicasDiffer, check_replicas
from gptlite.satellites.onebit.configs import ZeroOneAdamConfig
from gptlite.satellites.onebit.momenta import CODEC, vector_layout
from gptlite.satellites.onebit.zero_one import Intervals
from gptlite.start.pretrain import pretrain
from gptlite.trainer import trainer
from gptlite.trainer.eval import Evaluation, evaluate_sets
from gptlite.trainer.folder import RunFolder
from onebit.cases import Seen
from onebit.simulation import Simulation
from onebit.test_checks import RUN as CHECKED
from onebit.test_runs import FREEZE, error_sums, same, values_of
from onebit.test_simulation import RUN, config, differing, rule

STEPS = 30
# Intervals of 1 up to step 12, 2 up to 16, then 4.
LOCAL = ["optimizer.local_step_scaler=4", "optimizer.local_step_clipper=4"]
ENDS = [*range(1, 13), 14, 16, 20, 24, 28]


def test_intervals_double_up_to_the_clipper():
    assert [Intervals(8, 4, 5).at(step) for step in (1, 8, 9, 12, 13, 16, 17, 20, 21, 1000)] == [
        *[1] * 4,
        2,
        2,
        4,
        4,
        5,
        5,
    ]
    assert [step for step in range(1, STEPS + 1) if Intervals(FREEZE, 4, 4).ends(step)] == ENDS
    assert all(Intervals(8, 4, 1).ends(step) for step in range(1, 50))


def test_the_interval_doubles_at_quarters_of_the_steps_that_are_left():
    assert ZeroOneAdamConfig(freeze_step=200).completed(1000, 100).local_step_scaler == 200
    assert ZeroOneAdamConfig(freeze_step=200, local_step_scaler=7).completed(1000, 100).local_step_scaler == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["local_step_clipper=0"], r"optimizer.local_step_clipper=0 must be 1 \(exchanges in all steps\) or more"),
        (["local_step_clipper=2", "local_step_scaler=0"], "optimizer.local_step_scaler=0 must be 1 or more, or null"),
        (
            ["local_step_clipper=16", "zero=1"],
            "optimizer.local_step_clipper=16 lets the parameters .* but parallelism.zero=1 gathers .*; use "
            "parallelism=ddp, or optimizer.local_step_clipper=1",
        ),
        (["local_step_clipper=16", "context=2"], "but parallelism.context=2 shares .*; use parallelism.context=1"),
    ],
)
def test_refuses(overrides: list[str], message: str):
    words = [f"{'optimizer' if each.startswith('local') else 'parallelism'}.{each}" for each in overrides]
    with pytest.raises(ConfigError, match=message):
        load(["optimizer=zero_one_adam", *CHECKED, *words])


def compare(config: Config, ranks: list[Seen], means: list[dict[str, float]]) -> None:
    """Compares ranks that exchange the same values with a simulation, which begins each interval with the values of the
    run (see test_simulation.py)."""
    ranks = sorted(ranks, key=lambda each: each.lane)
    for names in ranks[0].vectors:
        simulation = Simulation(rule(config), len(ranks), {name: ranks[0].first[name] for name in names})
        missing = {name: np.zeros_like(x) for name, x in simulation.x.items()}  # of the sums that were sent
        for step, (_, norm, lr) in enumerate(ranks[0].results):
            simulation.means = {name: means[step][name] for name in names if means}
            gradients = [each.gradients[step] for each in ranks]
            ends, alone = step + 1 in ENDS, step >= 12
            (simulation.alone if alone else simulation.take)(gradients, lr, norm)
            if alone and not ends:
                for each, walks in zip(ranks, simulation.walks, strict=True):
                    for name, walk in walks.items():
                        assert differing(each.after[step]["m"][name], walk.m) == 0, (step, name)
                        near = np.abs(walk.x - simulation.x[name]).max() + 2e-3 * np.abs(walk.x).max()
                        assert differing(each.after[step]["x"][name], walk.x, near) == 0, (step, name)
                continue
            ties = 0
            if alone:
                sent = [simulation.sent(), simulation.count]
                simulation.meet()
                for name in names:
                    signs = ranks[0].after[step]["m"][name] * sent[1] / simulation.roots(name)
                    missing[name] += sum(each[name] for each in sent[0]) - signs
            for name in names:
                ties += differing(ranks[0].after[step]["m"][name], simulation.state[name]["m"])
                simulation.state[name]["m"] = ranks[0].after[step]["m"][name]
                x, former = simulation.x[name], (ranks[0].after[step - 1]["x"] if step else ranks[0].first)[name]
                simulation.x[name] = ranks[0].after[step]["x"][name]
                for each in ranks:  # ulps of x are large beside its steps
                    near = np.abs(simulation.x[name] - former).max() + 2e-3 * np.abs(x).max()
                    ties += differing(each.after[step]["x"][name], x, near)
            if step + 1 not in simulation.rule.dense:
                for each, errors in zip(ranks, simulation.errors(), strict=True):
                    ties += sum(differing(each.after[step]["errors"][name], errors[name]) for name in names)
                simulation.set_errors([each.after[step]["errors"] for each in ranks])
            if step + 1 == 12:
                begun = {name: sum(each.after[step]["errors"][name] for each in ranks) for name in names}
            assert ties <= 2 * (2 + 2 * len(ranks)), (step, names)
        for name in names:
            kept = sum(each.after[27]["errors"][name] for each in ranks)  # after the last exchange
            assert np.abs(missing[name] + begun[name] - kept).max() <= 1e-5 * np.abs(kept).max(), name


def test_two_ranks_take_the_steps_of_the_simulation(two: Ranks):
    run = config("zero_one_adam", "parallelism.data=2", *LOCAL)
    ranks = two.run("onebit.cases:steps", run, STEPS, timeout=200)
    compare(run, ranks, [])
    assert ranks[0].apart == [step not in ENDS for step in range(1, STEPS + 1)]
    assert any(np.any(ranks[0].after[-1]["x"][name] != ranks[1].after[-1]["x"][name]) for name in ranks[0].first)
    sent = [bool(each) for each in ranks[0].sent]
    assert sent == [step in ENDS and step not in rule(run).dense for step in range(1, STEPS + 1)]
    sizes = [[ranks[0].first[name].size for name in names] for names in ranks[0].vectors]
    blocks = [vector_layout(tuple(each), 2).blocks for each in sizes]
    assert sum(ranks[0].sent) == sum(sent) * sum(all_reduce_bytes(CODEC, count // 2, 2) for count in blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["data=4", "data=2 tensor=2 sequence=true", "data=2 pipeline=2", "data=4 dp_replicate=2 zero=1"]
)
def test_four_ranks_take_the_steps_of_the_simulation(four: Ranks, layout: str):
    run = config("zero_one_adam", *(f"parallelism.{word}" for word in layout.split()), *LOCAL)
    ranks = four.run("onebit.cases:steps", run, STEPS, timeout=300)
    lines: dict[str, list[Seen]] = {}
    for each in ranks:
        lines.setdefault(each.line, []).append(each)
    for line in lines.values():
        compare(run, line, ranks[0].mean)


def checked(config: Config, at: int) -> tuple[bool, bool, bool]:
    """Whether ranks are apart after so many steps, whether a comparison of copies then fails, and whether the check of
    a run does in any step."""
    with built(config) as (mesh, state, step):
        check, fails = ReplicaCheck(1), False
        for _ in range(at):
            step(state)
            try:
                check.settled(state)
            except ReplicasDiffer:
                fails = True
        try:
            check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
        except ReplicasDiffer:
            return state.runner.mesh.reduction.apart, True, fails
        return state.runner.mesh.reduction.apart, False, fails


def test_replicas_are_compared_after_exchanges_alone(two: Ranks):
    run = config("zero_one_adam", "parallelism.data=2", *LOCAL)
    assert two.run("onebit.test_local_steps:checked", run, 19, timeout=200) == [(True, True, False)] * 2
    assert two.run("onebit.test_local_steps:checked", run, 20, timeout=200) == [(False, False, False)] * 2


def saved_apart(config: Config, at: int, last: int):
    """As `saved`, and whether ranks were apart before and after the save."""
    with built(config) as (mesh, state, step):
        for _ in range(at):
            step(state)
        before, folder = state.runner.mesh.reduction.apart, RunFolder(config, mesh)
        with closing(folder.checkpointer):
            folder.save(state)
            folder.finish_saves()
        after = state.runner.mesh.reduction.apart
        check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
        sums, stored = error_sums(state), values_of(state)
        losses = [step(state).loss for _ in range(last - at)]
        state.settle()
        return losses, values_of(state), sums, stored, (before, after)


def resumed_apart(config: Config, last: int):
    """A run that goes on from that checkpoint."""
    with built(config) as (mesh, state, step):
        folder = RunFolder(config, mesh)
        with closing(folder.checkpointer):
            folder.restore(state)
        sums, stored = error_sums(state), values_of(state)
        losses = [step(state).loss for _ in range(last - state.step)]
        state.settle()
        return losses, values_of(state), sums, stored


def test_a_save_between_exchanges_has_one_state_from_which_a_run_resumes_bit_for_bit(two: Ranks, tmp_path: Path):
    run = config("zero_one_adam", "parallelism.data=2", f"run.dir={tmp_path / 'run'}", *LOCAL)
    losses, values, sums, stored, apart = two.run("onebit.test_local_steps:saved_apart", run, 18, 25, timeout=200)[0]
    assert apart == (True, False)
    again, resumed, resumed_sums, restored = two.run("onebit.test_local_steps:resumed_apart", run, 25, timeout=200)[0]
    assert again == losses
    assert same(restored, stored)
    assert same(resumed, values)
    assert same(resumed_sums, sums)
    assert any(np.any(each) for each in sums.values())
    alone = config("zero_one_adam", "parallelism.data=1", f"run.dir={tmp_path / 'run'}", *LOCAL)
    _, _, _, restored = resumed_apart(alone, 18)
    assert same(restored, stored)


def evaluations(overrides: list[str]) -> tuple[int, list[bool]]:
    """The exit code of a run, and whether ranks are apart in each of its evaluations."""
    apart: list[bool] = []

    def recorded(model: Model, runner: StageRunner, *args: Any) -> Evaluation:
        apart.append(runner.mesh.reduction is not None and runner.mesh.reduction.apart)
        return evaluate_sets(model, runner, *args)

    with mock.patch.object(trainer, "evaluate_sets", recorded):
        return pretrain(load(overrides)).exit_code, apart


def test_a_run_evaluates_checks_and_saves_between_exchanges(two: Ranks, tmp_path: Path):
    words = [each for each in RUN if not each.startswith(("run.", "trainer.max_steps"))]
    words += [
        *"optimizer=zero_one_adam optimizer.freeze_step=4 optimizer.local_step_scaler=2 optimizer.lr=1e-3".split(),
        *"optimizer.local_step_clipper=8 trainer.max_steps=21 trainer.eval_interval=7 checkpoint.interval=5".split(),
        *"trainer.replica_check_interval=1 trainer.sample_tokens=0 parallelism.data=2 trainer.eval_samples=8".split(),
        f"run.dir={tmp_path / 'run'}",
    ]
    assert two.run("onebit.test_local_steps:evaluations", words, timeout=300) == [(0, [False] * 3)] * 2
