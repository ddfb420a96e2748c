"""Draws of the fuzz with fillers in each batch, beside one process that needs none."""

from collections.abc import Iterator
from itertools import islice

import pytest

from gptlite.config.batch import check_world
from gptlite.config.checks import check
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.satellites.certify.fuzz.axes import Draw, number, overrides, world
from gptlite.satellites.certify.fuzz.draw import Drawing
from gptlite.satellites.certify.fuzz.legal import composed
from gptlite.satellites.certify.fuzz.oracle import Oracle
from gptlite.satellites.certify.fuzz.ranks import RankPool
from gptlite.satellites.elastic.degree import largest

RANKS = 6


class UnevenOracle(Oracle):
    """Judges draws as elastic runs whose micro-batches are too large by one sample."""

    def layout(self, draw: Draw) -> Config:
        return uneven(draw)


def uneven(draw: Draw) -> Config:
    """The configuration of a draw as an elastic run, whose micro-batches are too large by one sample."""
    values = dict(each.split("=", 1) for each in overrides(draw))
    del values["parallelism.data"]
    values["data.micro_batch_size"] = str(int(values["data.micro_batch_size"]) + 1)
    return composed([*(f"{key}={value}" for key, value in values.items()), "parallelism.elastic=true"])


def legal(draw: Draw) -> bool:
    config = uneven(draw)
    try:
        check(config)
        check_world(config, world(draw))
    except ConfigError:
        return False
    return largest(config, world(draw)) == world(draw)


def draws(seed: int) -> Iterator[Draw]:
    """Draws of several data ranks that are legal as elastic runs."""
    drawing = Drawing(seed, RANKS)
    return (draw for draw in drawing if number(draw, "data") > 1 and legal(draw))


@pytest.fixture(scope="module")
def oracle() -> Iterator[UnevenOracle]:
    with RankPool(RANKS) as ranks:
        oracle = UnevenOracle(ranks)
        yield oracle
        oracle.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_draws_with_fillers_train_as_one_process_does(oracle: UnevenOracle, seed: int) -> None:
    """What differs by chance, as of which expert two equal scores choose, does not with another seed."""
    for draw in islice(draws(seed), 12):
        judgement = oracle.judge(draw)
        if judgement.kind == "parity":
            judgement = oracle.judge(draw | {"seed": "" if draw["seed"] else "seed=5"})
        assert judgement.ok, (judgement, draw)
