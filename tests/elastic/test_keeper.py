"""Ranks that survive the loss of others, with torchrun's agents on one machine as nodes."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.nodes import Nodes
from gptlite.start.api import launch
from gptlite.start.load import load

pytestmark = pytest.mark.slow
INTERVAL = 5


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path, "trainer.max_steps=100000", f"checkpoint.interval={INTERVAL}")
    yield found
    found.end()


def whole(nodes: Nodes, steps: int) -> dict[int, float]:
    """The losses of the run in one process, without an interruption."""
    from elastic.nodes import TINY

    single = Nodes(nodes.folder / "single")
    config = load([*TINY, f"run.dir={single.run}", "trainer.max_steps=100000", f"trainer.stop_step={steps}"])
    assert launch(config).exit_code == 0
    return single.losses()


def test_a_killed_rank_and_a_killed_worker_leave_the_others_in_their_processes(nodes: Nodes) -> None:
    nodes.start(0, "2")
    nodes.start(1, "2")
    nodes.training(2)
    nodes.steps(INTERVAL)
    (zero,), (one,) = nodes.ranks(0), nodes.ranks(1)

    row = nodes.restarted(lambda: os.kill(one, signal.SIGKILL))
    assert (row["world"], row["nodes"], row["data"], row["cause"]) == (2, 2, 2, "killed by SIGKILL")
    assert row["lost_step"] - INTERVAL <= row["restored_step"] <= row["lost_step"]
    assert nodes.ranks(0) == [zero]  # this one has survived
    (new,) = nodes.ranks(1)
    assert new != one
    assert "a rank of node 1 lost at step" in (nodes.run / "train.log").read_text()

    row = nodes.restarted(lambda: os.kill(nodes.workers(0)[0], signal.SIGKILL))
    assert row["cause"] == "a worker has ended"
    assert (nodes.ranks(0), nodes.ranks(1)) == ([zero], [new])
    nodes.steps(3)
    nodes.stop()
    resume = (nodes.run / "train.log").read_text().rpartition("resume:")[2]
    assert "-m torch.distributed.run --nnodes=2 " in resume
    losses = nodes.losses()
    assert sorted(losses) == list(range(1, max(losses) + 1))
    for step, loss in whole(nodes, max(losses)).items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step


def test_a_killed_node_is_lost_and_one_that_comes_later_is_back(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.training(1)
    (zero,) = nodes.ranks(0)
    row = nodes.restarted(lambda: nodes.start(1))
    assert (row["world"], row["cause"]) == (2, "nodes came")
    assert row["lost_step"] == row["restored_step"]  # a rejoin repeats no step
    lost = nodes.processes(1)
    row = nodes.restarted(nodes.agents[1].kill)
    assert (row["world"], row["nodes"], row["data"], row["cause"]) == (1, 1, 1, "connection lost")
    nodes.agents.pop(1).wait()
    row = nodes.restarted(lambda: nodes.start(1))
    assert row["world"] == 2
    assert nodes.ranks(0) == [zero]  # in the same process all the time
    nodes.steps(2)
    assert not set(lost) & set(nodes.processes(1))
    nodes.stop()
    log = (nodes.run / "train.log").read_text()
    assert "node 1 lost at step" in log
    assert log.count("node 1 back at step") == 2
    losses = nodes.losses()
    for step, loss in whole(nodes, max(losses)).items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step


def test_ranks_wait_for_a_keeper_that_is_slow_to_start_and_there_is_one(nodes: Nodes) -> None:
    """Longer than a collective may take, and even if the worker that has started it is gone meanwhile."""
    nodes.overrides.append("parallelism.timeout_seconds=3")
    nodes.start(0)
    nodes.training(1)

    def join() -> None:
        nodes.start(1)
        nodes.wait(lambda: nodes.keeper(1) is not None)
        keeper = nodes.keeper(1)
        assert keeper is not None
        os.kill(keeper, signal.SIGSTOP)
        os.kill(nodes.workers(1)[0], signal.SIGKILL)  # its agent starts another one
        time.sleep(12)
        assert nodes.keepers(1) == [keeper]
        os.kill(keeper, signal.SIGCONT)

    assert nodes.restarted(join)["world"] == 2
    assert len(nodes.restarts()) == 1
    nodes.stop()


def test_a_frozen_first_node_is_lost_and_changes_nothing_when_it_runs_again(nodes: Nodes) -> None:
    nodes.start(0, "1:2")
    nodes.training(1)
    nodes.restarted(lambda: nodes.start(1))
    nodes.steps(INTERVAL)
    first = 0 if "rank-1" in "".join(os.listdir(nodes.run / "ranks")) else 1
    frozen = nodes.processes(first)

    def freeze() -> None:
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

    def thaw() -> None:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)

    try:
        row = nodes.restarted(freeze)
        assert row["world"] == 1
        assert 10 <= row["seconds"] < 60
        assert "for 1" in row["cause"]  # no heartbeat of rank 0, or no answer of the store
        nodes.steps(3)
    finally:
        row = nodes.restarted(thaw)
    assert row["world"] == 2
    nodes.steps(2)
    nodes.stop()
    losses = nodes.losses()
    for step, loss in whole(nodes, max(losses)).items():
        assert losses[step] == pytest.approx(loss, rel=1e-5), step
