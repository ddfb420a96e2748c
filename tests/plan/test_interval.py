"""The best interval between checkpoints, beside simulated failures."""

import random
from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

import pytest

from gptlite.config.cluster import ClusterConfig
from gptlite.satellites.plan.interval import Failures, PlannedSaves, mtbf_of, mtbf_of_memory


def simulated(failures: Failures, interval: float, work: float, seed: int, in_restarts: bool = True) -> float:
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
        while in_restarts and wall + failures.restart > next_failure:
            wall = next_failure
            next_failure = wall + draw.expovariate(1 / failures.mtbf)
        wall += failures.restart
        next_failure += 0 if in_restarts else failures.restart
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


def test_restarts_that_never_fail() -> None:
    """As measured in a run whose losses are counted: a restart then takes as long as the time between losses."""
    for failures in (Failures(mtbf=22, save=1, restart=38), Failures(mtbf=3600, save=30, restart=60)):
        for interval in (0.1 * failures.mtbf, failures.mtbf):
            measured = simulated(failures, interval, 3000 * failures.mtbf, 2, in_restarts=False)
            assert failures.goodput(interval, in_restarts=False) == pytest.approx(measured, abs=0.01)


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


def saves(nodes: int, in_background: bool = False) -> PlannedSaves:
    """A run of 10 s a step whose checkpoint of 640 GB takes 10 s on all nodes, and 0.1 s to copy."""
    cluster = ClusterConfig(nodes=nodes, disk_gb_per_second=64 / nodes, host_link_gb_per_second=25.0, mtbf_hours=1000.0)
    return PlannedSaves(cluster, 640_000_000_000, world=256, step=10.0, max_steps=100_000, in_background=in_background)


def test_a_plan_has_the_best_intervals_of_both_kinds() -> None:
    plan, mtbf = saves(32), 1000 * 3600 / 32
    assert (plan.disk_seconds, plan.copy_seconds) == (10, 0.1)
    disk, memory = Failures(mtbf, 10, 40), Failures(mtbf, 0.1, 20.1)
    head, first, second = (text for _, text in plan.lines())
    assert head == "one of 32 nodes every 1d07h, planned with a restart in 40 s from disk"
    every, often = round(disk.daly() / 10), round(memory.daly() / 10)
    assert (every, often) == (149, 15)
    assert first == f"checkpoint.interval=149: 10 s a save, goodput {disk.goodput(1490):.1%}"
    lost = mtbf_of_memory(1000, 32, 1, 20.1 + 150)
    rest = Failures(lost, 10, 40)
    both = memory.goodput(150) * rest.goodput(10 * rest.best_steps(10))
    assert second == (
        f"checkpoint.memory_interval=15 checkpoint.replicas=1 checkpoint.interval={rest.best_steps(10)}: "
        f"0.1 s a copy, restart in 20 s, goodput {both:.1%}"
    )
    assert disk.goodput(1490) < both


def test_a_save_in_the_background_ends_before_the_next() -> None:
    _, line, *_ = (text for _, text in saves(32, in_background=True).lines())
    assert line.startswith("checkpoint.interval=15: 0.1 s a save")
    slow = replace(saves(32, in_background=True), step=0.05)
    assert slow.lines()[1][1].startswith("checkpoint.interval=2999: ")  # 150 s
    slow = replace(slow, cluster=replace(slow.cluster, disk_gb_per_second=0.01))
    assert slow.lines()[1][1].startswith("checkpoint.interval=40000: ")  # 2000 s
    assert replace(slow, cluster=replace(slow.cluster, mtbf_hours=None)).lines() == []
    assert len(saves(1).lines()) == 2  # copies are on other nodes
