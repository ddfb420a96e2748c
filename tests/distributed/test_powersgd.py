"""parallelism.compression=powersgd: sums of gradients as matrices of low rank."""

from pathlib import Path

import numpy as np
import pytest
import torch

from distributed.cells.compression import error_sums
from distributed.cells.powersgd import Simulation, Sums
from distributed.cells.run import Ranks
from distributed.cells.steps import built
from distributed.test_compression import UNEVEN, chain, words
from gptlite.config import load

STEPS = 12


def compare(ranks: list[Sums]) -> None:
    """Compares ranks that sum the same matrices with a simulation of each, and a dense sum of the rest."""
    for name in ranks[0].steps[0][0]:
        begin = ranks[0].first.get(name)
        zeros = [np.zeros_like(each.steps[0][0][name]) for each in ranks]
        simulation = None if begin is None else Simulation(begin, zeros)
        short = zeros[0]  # the sum of what went in, less the sum of what came out
        for step in range(STEPS):
            gradients = [each.steps[step][0][name] for each in ranks]
            results = [each.steps[step][1][name] for each in ranks]
            assert all(np.array_equal(each, results[0]) for each in results)
            expected = sum(gradients) if simulation is None else simulation.take(gradients)
            size = np.linalg.norm(expected) + 1e-12
            assert np.linalg.norm(results[0] - expected) <= (1e-6 if simulation is None else 1e-3) * size, (name, step)
            short = short + sum(gradients) - results[0]
        errors = sum(each.errors[name] for each in ranks)
        scale = sum(np.linalg.norm(each.steps[step][0][name]) for each in ranks for step in range(STEPS))
        assert np.linalg.norm(short.ravel() - errors) <= 1e-6 * scale
        if simulation is None:
            assert not np.any(errors)
        else:
            assert np.linalg.norm(errors) > 1e-2 * np.linalg.norm(sum(each.steps[-1][0][name] for each in ranks))
    assert all(each.sent == each.planned > 0 for each in ranks)


def test_two_ranks_sum_as_the_simulation_does(two: Ranks):
    run = load(words("data=2 compression=powersgd compression_rank=2", "data.micro_batch_size=12"))
    ranks = two.run("distributed.cells.powersgd:watched", run, STEPS, timeout=200)
    assert 0 < len(ranks[0].first) < len(ranks[0].errors)
    compare(ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["data=4", "data=2 tensor=2 sequence=true", "data=2 tensor=2", "data=2 pipeline=2", "data=4 zero=1 dp_replicate=2"],
)
def test_four_ranks_sum_as_the_simulation_does(four: Ranks, layout: str):
    more = [*UNEVEN, "data.micro_batch_size=6"]
    run = load(words(f"{layout} compression=powersgd compression_rank=2", *more))
    ranks = four.run("distributed.cells.powersgd:watched", run, STEPS, timeout=300)
    lines = {"data=4": [ranks], "data=2 tensor=2": [ranks[0::2], ranks[1::2]]}
    # The pipeline's ranks come first, replicas before shards, and tensor ranks last.
    for line in lines.get(
        layout.removesuffix(" sequence=true"),
        [ranks[:2], ranks[2:]] if "pipe" in layout else [ranks[0::2], ranks[1::2]],
    ):
        compare(line)


def test_a_gradient_that_was_zero_is_summed_later(two: Ranks):
    results = two.run("distributed.test_powersgd:after_zeros", timeout=100)
    assert results == [True, True]


def after_zeros() -> bool:
    """Whether a matrix that had gradients of 0 gets its sum, of rank 1."""
    run = load(words("data=2 compression=powersgd compression_rank=1", "data.micro_batch_size=12"))
    with built(run) as (_, state, step):
        step(state)
        reduction = state.runner.mesh.reduction
        bucket = reduction.buckets[0]
        n, group = sum(bucket.sizes), reduction.mesh.group("dp_replicate")
        for held in reduction._errors.values():
            held.values.zero_()
        reduction.sum(bucket, torch.zeros(n), group)
        flat, sizes = torch.zeros(n), bucket.sizes
        parts = dict(zip(bucket.parameters, flat.split(sizes), strict=True))
        parameter = next(each for each in bucket.parameters if each in reduction._factors)
        rows, columns = reduction._shapes(reduction._errors[bucket])[bucket.parameters.index(parameter)]
        matrix = torch.outer(torch.arange(1.0, rows + 1), torch.arange(1.0, columns + 1))
        parts[parameter].copy_(matrix.view(-1))
        reduction.sum(bucket, flat, group)
        return bool((parts[parameter].view(rows, columns) - 2 * matrix).norm() < 1e-5 * matrix.norm())


def test_a_run_resumes_to_the_bit_and_int4_takes_its_errors(two: Ranks, tmp_path: Path):
    run = load(words("data=2 compression=powersgd", "data.micro_batch_size=24"))
    whole = two.run("distributed.cells.compression:go_on", run, str(tmp_path / "whole"), None, 3, 2, timeout=200)
    again = two.run(
        "distributed.cells.compression:go_on", run, str(tmp_path / "again"), whole[0].path, 0, 2, timeout=200
    )
    assert [(each.losses, each.errors) for each in again] == [(each.losses, each.errors) for each in whole]
    assert any("factors" in key for key in whole[0].errors)
    other = load(words("data=2 compression=int4 zero=3", "data.micro_batch_size=24"))
    taken = two.run(
        "distributed.cells.compression:go_on", other, str(tmp_path / "int4"), whole[0].path, 0, 0, timeout=200
    )
    before, after = error_sums(whole[0].path), error_sums(taken[0].path)
    assert before.keys() == after.keys()
    assert all((after[name] - each).norm() <= 1e-6 * each.norm() for name, each in before.items())
    assert any(each.norm() > 0 for each in before.values())


@pytest.mark.slow
def test_any_layout_takes_the_errors_of_any_other(four: Ranks, tmp_path: Path):
    layouts = ["data=4", "data=2 tensor=2 sequence=true", "data=2 pipeline=2", "data=4 dp_replicate=2 zero=1", "data=2"]
    chain(four, [f"{each} compression=powersgd" for each in layouts[:-1]], tmp_path, *UNEVEN, "data.micro_batch_size=6")
