"""Runs of the 1-bit optimizers: their warm-up, checkpoints on the same and on other layouts, and bytes on the wire."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed.cells.run import Ranks
from distributed.cells.steps import built
from numpy.typing import NDArray

from gptlite.config import Config
from gptlite.parallelism.boxes import cut_like
from gptlite.satellites.onebit.adam import OneBitAdam
from gptlite.satellites.parity.gather import gather
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.state import TrainState
from onebit.test_simulation import FREEZE, config

Values = dict[str, NDArray]
LAST = FREEZE + 6


def taken(config: Config, count: int) -> tuple[list[tuple[float, float]], Values]:
    """Losses and norms of a run's steps, and on rank 0 all parameters and moments after them."""
    with built(config) as (_, state, step):
        results = [step(state) for _ in range(count)]
        return [(each.loss, each.grad_norm) for each in results], values_of(state)


def values_of(state: TrainState) -> Values:
    """All parameters and moments, on rank 0."""
    tensors = {key: tensor for key, tensor in state.tensors().items() if not key.startswith("errors.")}
    return {key: whole.value.numpy() for key, whole in (gather(tensors.items()) or {}).items()}


def error_sums(state: TrainState) -> Values:
    """The sums of all ranks' errors by parameter, on rank 0."""
    errors = {key: each for key, each in state.tensors().items() if key.startswith("errors.")}
    sums: Values = {}
    for key, whole in (gather(errors.items()) or {}).items():
        name = key.split(".", 3)[3]  # errors.momenta.RANK.NAME
        sums[name] = sums.get(name, 0) + whole.value.double().numpy()
    return sums


def saved(config: Config, at: int, last: int) -> tuple[list[float], Values, Values]:
    """A run that saves after `at` steps: the losses after it, the values at the end, and the sums of saved errors."""
    with built(config) as (mesh, state, step):
        for _ in range(at):
            step(state)
        folder = RunFolder(config, mesh)
        with closing(folder.checkpointer):
            folder.save(state)
            folder.finish_saves()
        sums = error_sums(state)
        losses = [step(state).loss for _ in range(last - at)]
        return losses, values_of(state), sums


def resumed(config: Config, last: int) -> tuple[list[float], Values, Values]:
    """A run that goes on from the checkpoint in its folder, as `saved`; the sums are those of its errors."""
    with built(config) as (mesh, state, step):
        folder = RunFolder(config, mesh)
        with closing(folder.checkpointer):
            folder.restore(state)
        sums = error_sums(state)
        losses = [step(state).loss for _ in range(last - state.step)]
        return losses, values_of(state), sums


def same(values: Values, expected: Values) -> bool:
    return values.keys() == expected.keys() and all(np.array_equal(values[key], expected[key]) for key in values)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("optimizer", "plain"), [("onebit_adam", "adamw"), ("zero_one_adam", "adamw"), ("onebit_lamb", "lamb")]
)
def test_the_warm_up_has_the_bits_of_the_plain_optimizer(two: Ranks, optimizer: str, plain: str, zero: int):
    layout = "parallelism.data=2", f"parallelism.zero={zero}"
    losses, values = two.run("onebit.test_runs:taken", config(optimizer, *layout), FREEZE, timeout=200)[0]
    plain_config = config(plain, *layout)
    plain_losses, plain_values = two.run("onebit.test_runs:taken", plain_config, FREEZE, timeout=200)[0]
    assert losses == plain_losses
    for key, value in plain_values.items():
        assert np.array_equal(values[key], value), key
    extra = ("fresh_avg_sq", "trust_avg", "factor")
    assert all(key.endswith(extra) for key in values.keys() - plain_values.keys())


@pytest.mark.parametrize(
    ("optimizer", "zero"), [("onebit_adam", 0), ("onebit_adam", 1), ("onebit_lamb", 1), ("zero_one_adam", 0)]
)
def test_an_equal_layout_resumes_bit_for_bit(two: Ranks, tmp_path: Path, optimizer: str, zero: int):
    run = config(optimizer, "parallelism.data=2", f"parallelism.zero={zero}", f"run.dir={tmp_path / 'run'}")
    losses, values, sums = two.run("onebit.test_runs:saved", run, FREEZE + 3, LAST, timeout=200)[0]
    again, resumed_values, resumed_sums = two.run("onebit.test_runs:resumed", run, LAST, timeout=200)[0]
    assert again == losses
    assert same(resumed_values, values)
    assert same(resumed_sums, sums)
    assert all(np.any(each) for name, each in sums.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=1", "data=2 tensor=2", "data=4 dp_replicate=2 zero=1"])
def test_another_layout_keeps_the_sum_of_errors(four: Ranks, two: Ranks, tmp_path: Path, layout: str):
    words = [f"parallelism.{word}" for word in layout.split()]
    source = config("onebit_adam", "parallelism.data=4", f"run.dir={tmp_path / 'run'}")
    target = config("onebit_adam", *words, f"run.dir={tmp_path / 'run'}")
    _, _, sums = four.run("onebit.test_runs:saved", source, FREEZE + 3, LAST, timeout=300)[0]
    ranks = four if "4" in layout or "tensor" in layout else two
    losses, _, resumed_sums = ranks.run("onebit.test_runs:resumed", target, LAST, timeout=300)[0]
    assert all(map(np.isfinite, losses))
    assert resumed_sums.keys() == sums.keys()
    for name, value in sums.items():
        assert np.abs(resumed_sums[name] - value).max() <= 1e-6 * np.abs(value).max(), name


def roots_of(config: Config) -> Values:
    """The roots of second moments by which updates are divided after the warm-up, of whole parameters on rank 0."""
    with built(config) as (_, state, step):
        for _ in range(FREEZE + 1):
            step(state)
        optimizer = state.optimizer
        assert isinstance(optimizer, OneBitAdam)
        names, parameters = zip(*state.named_parameters(), strict=True)
        roots = optimizer.momenta.roots(parameters, optimizer._local)
        named = {name: cut_like(each, root) for name, each, root in zip(names, parameters, roots, strict=True)}
        return {key: whole.value.numpy() for key, whole in (gather(named.items()) or {}).items()}


@pytest.mark.parametrize("layout", [["tensor=2"], ["data=2"], ["data=2", "zero=1"]])
def test_roots_do_not_depend_on_the_layout(two: Ranks, layout: list[str]):
    expected = roots_of(config("onebit_adam", "parallelism.data=1"))
    words = [f"parallelism.{each}" for each in layout]
    roots = two.run("onebit.test_runs:roots_of", config("onebit_adam", *words), timeout=200)[0]
    assert roots.keys() == expected.keys()
    least = {name: root == root.min() for name, root in expected.items()}
    raised = {name for name, places in least.items() if places.sum() > 1}  # to a hundredth of the root mean square
    assert {"token_embedding.weight", "layers.0.attn.qkv.bias"} <= raised
    for name in raised:
        values = roots[name][least[name]]
        assert np.abs(values / expected[name].min() - 1).max() < 2e-3, name


def test_one_rank_sends_nothing_and_keeps_the_exact_momentum():
    with built(config("onebit_adam", "parallelism.data=1", "optimizer.clip_norm=0")) as (_, state, step):
        for _ in range(FREEZE):
            step(state)
        (first, *_), gradients = state.optimizer.param_groups[0]["params"], []
        before = {key: each.clone() for key, each in state.optimizer.state[first].items()}
        step(state, lambda _: gradients.append(first.grad.clone()))
        after = state.optimizer.state[first]
    assert torch.equal(after["exp_avg_sq"], before["exp_avg_sq"])
    expected = (0.9 * before["exp_avg"] + 0.1 * gradients[0]) * (before["exp_avg_sq"] != 0)
    assert (after["exp_avg"] - expected).abs().max() <= 1e-6 * expected.abs().max()
