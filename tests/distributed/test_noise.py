"""Noise of gradients on several ranks: the sums of one process, however the same groups of samples are held."""

from unittest import mock

import pytest

from distributed.cells.layouts import BASE, GLOBAL_BATCH
from distributed.cells.run import Ranks
from distributed.cells.steps import built
from gptlite.config import load
from gptlite.satellites.noise import gradients

STEPS = 2
GROUPS = 4
SIZES = ["trainer.noise_scale=true", f"data.micro_batch_size={GLOBAL_BATCH // GROUPS}", "precision=fp32"]
SMALL = ["model.num_layers=2", "model.dropout=0.0"]


def sums(overrides: list[str], outside: tuple[str, ...] = ()) -> list[tuple[float, float, float]]:
    """Gradient norm, and averages of variance and squared mean, after each step. Parameters whose names end with one of
    `outside` are left out of the sums, as some layouts do."""

    def left_out(state, mesh):
        return [p for name, p in state.named_parameters() if name.endswith(outside)]

    replaced = mock.patch.object(gradients, "left_out", left_out) if outside else mock.MagicMock()
    with replaced, built(load([*BASE, *SMALL, *SIZES, *overrides])) as (_, state, step):
        results = []
        for _ in range(STEPS):
            norm = step(state).grad_norm
            results.append((norm, state.noise.estimate.variance, state.noise.estimate.square))
        return results


def sizes(overrides: list[str]) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Sizes of the batches of eight steps, and the changes of size."""
    ramp = ["data.batch_ramp=[16,16]", "data.ramp_steps=2", "data.ramp_factor=40", "data.micro_batch_size=4"]
    with built(load([*BASE, *SMALL, *SIZES, *ramp, *overrides])) as (_, state, step):
        return [step(state).samples for _ in range(8)], state.loader.schedule.grown


def close(values, others):
    for row, other in zip(values, others, strict=True):
        assert row == pytest.approx(other, rel=2e-5)


@pytest.fixture(scope="module")
def one() -> list[tuple[float, float, float]]:
    return sums([])


def test_a_sum_is_not_nothing(one):
    for norm, variance, square in one:
        assert variance > 0
        # The square of the norm is that of the mean and the noise of the batch.
        assert square < norm**2
    norm, variance, square = one[0]
    assert square + variance / GLOBAL_BATCH == pytest.approx(norm**2, rel=1e-6)


@pytest.mark.parametrize("zero", [2, 3])
def test_two_ranks_that_reduce_two_micro_batches_are_four_groups(two: Ranks, one, zero):
    for held in two.run("distributed.test_noise:sums", ["parallelism.data=2", f"parallelism.zero={zero}"]):
        close(held, one)


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_take_the_decisions_of_one_process(two: Ranks, zero):
    expected = sizes([])
    assert expected == ([16] * 7 + [32], ((112, 32), (176, 48)))
    layout = ["parallelism.data=2", f"parallelism.zero={zero}"]
    assert two.run("distributed.test_noise:sizes", layout) == [expected] * 2


def test_two_ranks_that_reduce_once_are_two_groups(two: Ranks):
    whole = f"data.micro_batch_size={GLOBAL_BATCH // 2}"
    values = [
        two.run("distributed.test_noise:sums", ["parallelism.data=2", f"parallelism.zero={zero}", whole])[0]
        for zero in range(4)
    ]
    reference = sums([whole])
    for each in values:
        close(each, reference)


def test_tensor_ranks_count_each_element_once(two: Ranks, one):
    for held in two.run("distributed.test_noise:sums", ["parallelism.tensor=2"]):
        close(held, one)


# Replicated over the tensor axis; with sequence parallelism each rank has their gradients from its slices.
PARTIAL = ("norm.weight", "norm.bias", "proj.bias", "down.bias", "position_embedding.weight")


@pytest.mark.slow
def test_partial_gradients_of_sequence_parallelism_stay_outside(two: Ranks):
    reference = sums([], PARTIAL)
    for held in two.run(
        "distributed.test_noise:sums", ["parallelism.tensor=2", "parallelism.sequence=true"], timeout=200
    ):
        close(held, reference)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_four_ranks_are_four_groups(four: Ranks, one, zero):
    for held in four.run(
        "distributed.test_noise:sums", ["parallelism.data=4", f"parallelism.zero={zero}"], timeout=200
    ):
        close(held, one)


@pytest.mark.slow
def test_replicas_of_shards_are_four_groups(four: Ranks, one):
    words = ["parallelism.data=4", "parallelism.zero=1", "parallelism.dp_replicate=2"]
    for held in four.run("distributed.test_noise:sums", words, timeout=200):
        close(held, one)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("more", ["parallelism.tensor=2", "parallelism.pipeline=2"])
def test_combined_layouts(four: Ranks, zero, more):
    words = [more, "parallelism.data=2", f"parallelism.zero={zero}", "model.tied_embeddings=false"]
    reference = sums(["model.tied_embeddings=false"])
    for held in four.run("distributed.test_noise:sums", words, timeout=200):
        close(held, reference)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["parallelism.schedule=gpipe"]])
def test_a_pipeline_reads_whole_backward_passes(two: Ranks, more):
    words = ["parallelism.pipeline=2", "model.tied_embeddings=false", *more]
    reference = sums(["model.tied_embeddings=false"])
    for held in two.run("distributed.test_noise:sums", words, timeout=200):
        close(held, reference)
