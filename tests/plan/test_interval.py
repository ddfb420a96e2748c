"""The best interval between checkpoints, beside simulated failures."""

import random
from collections.abc import Iterator
from math import sqrt

import pytest

from gptlite.satellites.plan.interval import Failures, mtbf_of, mtbf_of_memory


def simulated(failures: Failures, interval: float, work: float, seed: int) -> float:
    """The goodput of `work` seconds with exponential times between failures, which also hit saves and restarts."""
    draw = random.Random(seed)
    wall, done, next_failure = 0.0, 0.0, draw.expovariate(1 / failures.mtbf)
    while done < work:
        if wall + interval + failures.save <= next_failure:
            wall += interval + failures.save
            done += interval
            continue
        wall = next_failure
        next_failure = wall + draw.expovariate(1 / failures.mtbf)
        while wall + failures.restart > next_failure:
            wall = next_failure
            next_failure = wall + draw.expovariate(1 / failures.mtbf)
        wall += failures.restart
    return done / wall


CASES = (
    Failures(mtbf=3600 * 8, save=30, restart=120),  # a thousand GPUs, on disk
    Failures(mtbf=3600, save=0.5, restart=10),  # in memory
    Failures(mtbf=900, save=120, restart=200),  # saves that are slow for this machine
)


@pytest.mark.parametrize("failures", CASES)
def test_the_estimate_is_the_best_of_simulated_failures(failures: Failures) -> None:
    best = failures.daly()
    work = 4000 * failures.mtbf
    measured = {factor: simulated(failures, factor * best, work, seed=1) for factor in (0.25, 0.5, 0.8, 1, 1.25, 2, 4)}
    for factor, value in measured.items():
        assert failures.goodput(factor * best) == pytest.approx(value, abs=0.01), factor  # 1 percentage point
    assert measured[1] > max(measured.values()) - 0.004  # the optimum is flat
    assert max(measured, key=lambda factor: measured[factor]) in (0.8, 1, 1.25)
    assert min(measured[0.25], measured[4]) < measured[1] - (0.001 if failures.save < 1 else 0.01)


def steps(most: int) -> Iterator[float]:
    for tenth in range(1, most):
        yield tenth / 10


@pytest.mark.parametrize("failures", CASES)
def test_the_estimate_is_the_best_of_its_own_model(failures: Failures) -> None:
    """Daly's estimate of the optimum is within 1e-3 of that of his model; Young's is worse where saves are slow."""
    best = max(failures.goodput(factor * failures.daly()) for factor in steps(40))
    assert failures.goodput(failures.daly()) > best - 1e-3
    assert failures.young() == sqrt(2 * failures.save * failures.mtbf)
    assert failures.goodput(failures.young()) <= best
    assert failures.best_steps(step=7.0) == round(failures.daly() / 7)
    assert failures.best_steps(step=1e9) == 1


def test_saves_slower_than_failures_leave_the_mean_time_between_them() -> None:
    assert Failures(mtbf=10, save=25, restart=1).daly() == 10
    assert Failures(mtbf=10, save=1, restart=1).goodput(1e6) == 0.0


def test_nodes_fail_independently() -> None:
    assert mtbf_of(hours=1000, nodes=500) == 7200
    assert mtbf_of_memory(1000, 500, replicas=0, exposed=60) == 7200
    exposed, hours, nodes = 36.0, 1.0, 8
    draw, losses, count = random.Random(3), 0, 200_000
    for _ in range(count):  # the first node fails at 0; a neighbour within the exposed time
        losses += any(draw.expovariate(1 / (hours * 3600)) < exposed for _ in range(2))
    assert mtbf_of_memory(hours, nodes, 1, exposed) == pytest.approx(450 * count / losses, rel=0.05)
    assert mtbf_of_memory(hours, nodes, 2, exposed) > 50 * mtbf_of_memory(hours, nodes, 1, exposed)
