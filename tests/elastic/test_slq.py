"""A node leaves an elastic run if it stays slower than the others, and not for a hiccup or another stage's work."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.cells.run import Ranks

import gptlite.start.pretrain
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.satellites.elastic import slow
from gptlite.satellites.elastic.shelf import Shelf
from gptlite.satellites.elastic.slow import Departure, SlowNodes, slowness
from gptlite.satellites.monitor.comm_time import Window
from gptlite.trainer.signals import StopSignal

ELASTIC = ["parallelism.elastic=true", "data=synthetic"]


class Nodes:
    """SlowNodes and the nodes that it has leave, for a node per rank, stage by stage."""

    def __init__(self, world: int, stages: int = 1, factor: float = 1.5) -> None:
        layout = resolve(ParallelismConfig(pipeline=stages, zero=0), world)
        self.left: list[tuple[str, str]] = []
        departure: Any = SimpleNamespace(
            nodes=[str(rank) for rank in range(world)],
            ask=lambda node, why: self.left.append((node, why)),
        )
        self.times: Any = SimpleNamespace(window=None)
        mesh: Any = SimpleNamespace(layout=layout, world_size=world)
        self.slow = SlowNodes(factor, mesh, self.times, departure)

    def row(self, *computing: float, seconds: float = 10.0) -> None:
        self.times.window = Window([each / max(computing) for each in computing], seconds)
        self.slow.look()
        self.slow.look()  # the same row, before the next step


def test_a_node_that_stays_slower_leaves() -> None:
    nodes = Nodes(4)
    for _ in range(2):
        nodes.row(1, 1.02, 1.8, 0.98)
    assert nodes.left == []
    nodes.row(1, 1.02, 1.8, 0.98)
    assert nodes.left == [("2", "is 1.8 times slower than the others over 30 s")]


def test_windows_are_of_ten_seconds_of_steps_at_least() -> None:
    nodes = Nodes(3)
    for number in range(30):
        assert nodes.left == [], number
        nodes.row(1, 1.7, 1, seconds=1.0)
    assert [node for node, _ in nodes.left] == ["1"]


def test_the_slowest_of_several_leaves_first() -> None:
    nodes = Nodes(5)
    for _ in range(3):
        nodes.row(1, 1.7, 1, 2.5, 1)
    assert [node for node, _ in nodes.left] == ["3"]


def test_a_hiccup_does_not_count() -> None:
    nodes = Nodes(4)
    for _ in range(5):
        nodes.row(1, 1, 9, 1)
        nodes.row(1, 1, 9, 1)
        nodes.row(1, 1, 1.1, 1)
    assert nodes.left == []


def test_noise_does_not_count() -> None:
    """Log-normal noise of 15%, over five hours of 16 nodes."""
    draw, nodes = random.Random(1), Nodes(16)
    for _ in range(1800):
        nodes.row(*(draw.lognormvariate(0, 0.15) for _ in range(16)))
    assert nodes.left == []


def test_only_ranks_of_the_same_stage_are_compared() -> None:
    nodes = Nodes(4, stages=2)
    for _ in range(5):
        nodes.row(1, 1, 3, 3)  # the last stage has the head
    assert nodes.left == []
    for _ in range(3):
        nodes.row(1, 1, 3, 5.4)
    assert [node for node, _ in nodes.left] == ["3"]
    assert slowness([1, 5], [(0, "a"), (1, "b")]) == {}  # there is nothing to compare with


def test_a_node_is_as_slow_as_its_slowest_rank() -> None:
    places = [(0, "a"), (0, "a"), (0, "b"), (0, "b"), (0, "c"), (0, "c")]
    assert slowness([1, 1, 1, 2, 1, 1], places) == {"a": 1 / 1.5, "b": 2, "c": 1 / 1.5}


def departure(shelf: Shelf, nodes: list[str], rank: int, *more: str) -> tuple[Departure, list[str]]:
    lines: list[str] = []
    mesh: Any = SimpleNamespace(world_size=1, rank=0, is_main=rank == 0)
    each = Departure(load([*ELASTIC, "data.global_batch_size=8", *more]), mesh, shelf, lines.append)
    each.nodes, mesh.rank = nodes, rank
    return each, lines


@contextmanager
def noted(number: int) -> Iterator[list[int]]:
    got: list[int] = []
    before = signal.signal(number, lambda number, frame: got.append(number))
    yield got
    signal.signal(number, before)


@pytest.mark.parametrize("more", [
    ["checkpoint.interval=10"], ["checkpoint.interval=0", "checkpoint.memory_interval=5"]
])  # fmt: skip
def test_one_rank_of_the_node_ends_its_launcher_after_a_checkpoint(more: list[str]) -> None:
    shelf = Shelf.new("b", os.getpid(), 0)
    with noted(signal.SIGTERM) as got:
        for rank, kills in enumerate([False, False, True, False]):
            each, lines = departure(shelf, ["a", "a", "b", "b"], rank, *more)
            assert each.ask("b", "is 1.8 times slower than the others over 60 s")
            assert not each.ask("a", "is slow, too")  # one at a time
            words = "node b is 1.8 times slower than the others over 60 s; it leaves the run after the next checkpoint"
            assert lines == ([words] if rank == 0 else [])
            for step, due in ((8, False), (10, True), (20, False)):
                each.before(SimpleNamespace(step=step))  # type: ignore[arg-type]
                assert (got == [signal.SIGTERM]) is (due and kills)
                got.clear()
    shelf.close()


def test_a_node_without_which_no_layout_is_left_stays() -> None:
    shelf = Shelf.new("b", os.getpid(), 0)
    each, lines = departure(shelf, ["a", "b", "b"], 0, "parallelism.tensor=2")
    assert not each.ask("b", "is 2.0 times slower than the others over 30 s")
    assert lines == [
        "node b is 2.0 times slower than the others over 30 s; it stays, as no layout of the run has 1 ranks or fewer"
    ]
    assert each.ask("a", "is 2.0 times slower than the others over 30 s")
    shelf.close()


def test_a_run_that_is_not_elastic_refuses_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^cluster.exclude_slow=1.5 needs a run that can go on without a node; use "):
        load(["data=synthetic", "cluster.exclude_slow=1.5"])
    with pytest.raises(ConfigError, match=r"^cluster.exclude_slow=1.0 must be at least 1.05"):
        load([*ELASTIC, "cluster.exclude_slow=1"])
    with pytest.raises(ConfigError, match=r"^cluster.mtbf_hours=0.0 must be above 0"):
        load(["data=synthetic", "cluster.mtbf_hours=0"])


def train_with_a_slow_rank(overrides: list[str], sleeping: int | None, jitter: bool) -> tuple[int, int | None]:
    """Trains, each rank as a node whose launcher is the rank; returns the exit code, and the signal of the launcher."""
    from gptlite.trainer.steps import Steps

    slow.SECONDS = 2.0
    rank, begin, draw = int(os.environ["RANK"]), Steps.begin, random.Random(os.environ["RANK"])

    def begun(self: Steps, state: Any) -> None:
        """A step of 0.15 s, 4 times as long on the slow rank, with a hiccup of each rank now and then."""
        if jitter:
            time.sleep(1.5 if draw.random() < 0.03 else draw.uniform(0.0, 0.03))
        time.sleep(0.6 if rank == sleeping else 0.15)
        begin(self, state)

    Steps.begin = begun  # type: ignore[method-assign]
    shelf, stop = Shelf.new(f"n{rank}", os.getpid(), 0), StopSignal()
    try:
        code = gptlite.start.pretrain.pretrain(load(overrides), None, stop, shelf=shelf).exit_code
    finally:
        Steps.begin = begin  # type: ignore[method-assign]
        shelf.close()
    return code, stop.received


# quick
@pytest.mark.parametrize(("sleeping", "jitter"), [(1, False), (2, True), (None, True)])
def test_ranks_of_which_one_is_slow(tiny: list[str], tmp_path: Path, sleeping: int | None, jitter: bool) -> None:
    overrides = [*tiny, f"run.dir={tmp_path / 'a'}", "parallelism.elastic=true", "cluster.exclude_slow=1.5"]
    overrides += ["trainer.max_steps=60", "trainer.log_interval=2", "trainer.eval_interval=10"]
    overrides += ["checkpoint.interval=5", "data.global_batch_size=6", "data.micro_batch_size=1"]
    with Ranks(3) as ranks:
        results = ranks.run("elastic.test_slq:train_with_a_slow_rank", overrides, sleeping, jitter, timeout=300)
    log = (tmp_path / "a" / "train.log").read_text()
    if sleeping is None:
        assert results == [(0, None)] * 3
        assert "leaves the run" not in log
        return
    assert results == [(143, signal.SIGTERM)] * 3  # by which the run has saved and stopped
    assert f"node n{sleeping} is " in log
    assert log.count("it leaves the run after the next checkpoint") == 1
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "a" / "checkpoints").glob("step-*"))
    assert steps[-1] == steps[-2] + 1  # the one after which it left, and that of the signal
