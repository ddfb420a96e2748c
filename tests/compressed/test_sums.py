"""Compressed sums on ranks against a float64 simulation."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.cells.run import Ranks

from compressed.cases import Case, first_errors, kept, values
from compressed.simulation import Workers
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.compressed.sums import all_reduce, all_reduce_bytes, reduce_scatter, reduce_scatter_bytes

ROUNDS = 30


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


def outcome(ranks: Ranks, case: Case) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Results [rank, round, ...], last errors [rank, chunk, ...] and the bytes of each rank and round."""
    results, errors, sent = zip(*ranks.run("compressed.cases:run", case), strict=True)
    return np.stack(results), np.stack(errors), list(sent)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_what_was_summed_is_what_was_sent_plus_the_last_errors(ranks: Ranks, kind: str, codec: str):
    case, world = Case(codec, kind, ROUNDS), ranks.world
    results, errors, _ = outcome(ranks, case)
    if kind == "all_reduce":
        assert (results == results[:1]).all()  # equal bits on all ranks
        sums = results[0].sum(0, dtype=np.float64)
    else:
        sums = results.sum(1, dtype=np.float64)
    added = sum(values(case, world, step).sum(0) for step in range(ROUNDS)) + first_errors(case, world).sum(0)
    largest = max(np.abs(values(case, world, step)).max() for step in range(ROUNDS))
    # An addition of fp32 rounds by 2^-24 of its result; a chunk of a round has less than 3 W of them.
    difference = np.abs(sums + errors.sum(0, dtype=np.float64) - added)
    assert difference.max() < 2**-24 * largest * 10 * np.sqrt(3 * world * ROUNDS)
    if codec != "bf16":
        assert np.abs(sums - added).max() > 100 * difference.max()  # so the errors have been a part of it


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_sums_are_those_of_a_simulation_in_float64(ranks: Ranks, kind: str, codec: str):
    """But for values so near to the middle of two codes that fp32 takes the other one."""
    case, world = Case(codec, kind, 4, zeros=100), ranks.world
    results, errors, _ = outcome(ranks, case)
    workers = Workers(codec, world, case.blocks, CODECS[codec].width)
    workers.errors = first_errors(case, world)
    sizes = np.abs(workers.errors).max(-1, keepdims=True)
    for step in range(case.rounds):
        sizes = np.maximum(sizes, np.abs(values(case, world, step)).max(-1, keepdims=True))
        expected = getattr(workers, kind)(values(case, world, step), kept(case, world))
        result = results[0, step] if kind == "all_reduce" else results[:, step]
        assert (np.abs(result - expected) <= 1e-5 * sizes.sum(0)).mean() > 0.998
    assert (np.abs(errors - workers.errors) <= 1e-5 * sizes.sum(0)).mean() > 0.998


@pytest.mark.parametrize("codec", CODECS)
def test_values_that_are_always_zero_stay_zero(ranks: Ranks, codec: str):
    case = Case(codec, "all_reduce", 5, zeros=70)
    (results, errors, _), zeros = outcome(ranks, case), ~kept(case, ranks.world)
    assert (results[..., zeros] == 0).all()
    assert (errors[:, zeros] == 0).all()
    assert (results[..., ~zeros] != 0).mean() > 0.7


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_of_the_formula(ranks: Ranks, codec: str):
    for kind, formula in (("all_reduce", all_reduce_bytes), ("reduce_scatter", reduce_scatter_bytes)):
        *_, sent = outcome(ranks, Case(codec, kind, 2, blocks=5))
        assert sent == [[formula(CODECS[codec], 5, ranks.world)] * 2] * ranks.world


@pytest.mark.parametrize("codec", CODECS)
def test_one_rank_gets_its_own_values_unchanged(codec: str, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        for function in (all_reduce, reduce_scatter):
            x = torch.randn(1, 2, CODECS[codec].width)
            errors, expected = torch.zeros_like(x), x.clone()
            result = function(x, errors, CODECS[codec], group)
            assert torch.equal(result.view_as(expected), expected)
            assert not errors.any()
    finally:
        dist.destroy_process_group()
