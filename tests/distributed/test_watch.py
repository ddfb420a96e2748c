"""Ranks that stop or hang are named, in real processes."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from marking import marked

from distributed.cells.commands import TRAIN, Start, free_port
from distributed.cells.run import RankFailed, run_ranks
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import Layout
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.tensor import leave, tensor_axis
from gptlite.satellites.monitor import stack_sampling, watchdog
from gptlite.satellites.monitor.stack_sampling import Place
from gptlite.satellites.monitor.verdict import Heartbeat, judge, rank_words
from gptlite.satellites.monitor.watchdog import RankWatch

THIS = "distributed.test_watch"
LIMIT = 6.0  # seconds


# A rank that stalls the others.


def wait_for_rank_1(how: str, axis: str) -> None:
    """Rank 0 waits along an axis for rank 1, which does something else."""
    mesh = build_mesh(ParallelismConfig(tensor=2))
    watch = RankWatch(mesh, LIMIT)
    all_reduce(torch.ones(4), mesh)  # all watch
    with watch.step(7):
        if mesh.rank == 1:
            loiter(how)
        elif axis == "tp":
            tensor = tensor_axis(mesh, sequence=False, overlap=False)
            assert tensor is not None
            leave(torch.ones(1, 2, 4), tensor)
        else:
            all_reduce(torch.ones(4), mesh)


def loiter(how: str) -> None:
    if how == "stop":
        time.sleep(1.5)  # a last word
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


@pytest.mark.parametrize(
    ("how", "axis", "words"),
    [
        ("stop", "tp", "has sent no heartbeat for "),
        pytest.param("sleep", "world", "has stalled the others for ", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stops_or_hangs_is_named(how: str, axis: str, words: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, f"{THIS}:wait_for_rank_1", how, axis, timeout=150)
    assert failure.value.rank == 0
    line = next(line for line in str(failure.value).splitlines() if line.startswith("error: "))
    assert line.startswith("error: rank 1 (")
    assert words in line
    assert "step 7, in loiter (" in line
    assert line.endswith(f"; rank 0 waits in all_reduce over {axis}")


@pytest.mark.slow
def test_rank_0_is_named_though_it_holds_the_store() -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": free_port()}
    with pytest.raises(
        RankFailed, match=r"error: rank 0 \(.* has not answered for .* rank 1 waits in all_reduce over world"
    ):
        run_ranks(2, f"{THIS}:wait_for_rank_0", env=env, timeout=150)


def wait_for_rank_0() -> None:
    mesh = build_mesh(ParallelismConfig(tensor=2))
    watch = RankWatch(mesh, LIMIT)
    all_reduce(torch.ones(4), mesh)  # all watch
    with watch.step(1):
        if mesh.rank == 0:
            loiter("stop")
        all_reduce(torch.ones(4), mesh)


@pytest.mark.parametrize(("layout", "victim"), marked([("tp2", 1), ("tp2", 0), ("tp2_pp2", 2)], slow=1))
def test_a_stopped_rank_of_a_run_is_named_and_nothing_is_left(
    start: Start, tiny: list[str], tmp_path: Path, layout: str, victim: int
):
    limit, folder, rows = 10, tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    options = [f"parallelism={layout}", f"parallelism.timeout_seconds={limit}", f"run.dir={folder}", "run.name=x"]
    with (tmp_path / "said").open("wb") as said:
        printed = {"stdout": said.fileno(), "stderr": said.fileno()}
        run = start(TRAIN, *tiny, *options, "trainer.max_steps=100000", **printed)
    run.wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 3, 120)
    before = sorted(folder.glob("checkpoints/*"))
    os.kill(run.rank(victim), signal.SIGSTOP)
    stopped = time.monotonic()
    logs = [tmp_path / "said", *folder.glob("ranks/*.log")]
    run.wait_for(lambda: any(f"error: rank {victim} (" in log.read_text() for log in logs), 60)
    assert time.monotonic() - stopped < limit
    assert run.end(60)[0] == 1
    text = (tmp_path / "said").read_text()
    assert "has sent no heartbeat for" in text
    assert "wait" in text.partition("has sent no heartbeat for")[2]
    assert sorted(folder.glob("checkpoints/*")) == before
    if victim:
        assert json.loads((folder / "result.json").read_text())["status"].startswith(f"failed: rank {victim} (")


# Who is to blame, from the ranks' heartbeats.

IN_TP = Place("collective", "all_reduce", "tp", "forward, in f (m.py:1)")
WAITING = Heartbeat(0, "a", 10, 5, 100.0, 12, IN_TP, 20.0)
WORKING = replace(WAITING, place=Place(words="in load (d.py:2)"), stood=21.0)
IN_PP = replace(IN_TP, collective="", axis="pp")


def beat(rank: int, like: Heartbeat = WAITING, **changes) -> Heartbeat:
    return replace(like, rank=rank, pid=10 + rank, **changes)


def old(beats: list[Heartbeat]) -> list[Heartbeat]:
    return [replace(each, beat=each.beat - 2) for each in beats]


def test_the_silent_rank_is_to_blame_and_the_others_places_are_said():
    now = [beat(0), beat(1), beat(2, place=IN_PP), beat(3, time=79.0)]
    assert judge([*old(now[:3]), now[3]], now, now=110.0) == (
        "rank 3 (a, pid 13) has sent no heartbeat for 31s; last position: step 12, forward, in f (m.py:1); "
        "ranks 0-1 wait in all_reduce over tp, rank 2 waits in send or receive over pp"
    )


def test_without_silence_it_is_the_rank_that_waits_for_none():
    now = [beat(0), beat(1, like=WORKING)]
    assert judge(old(now), now, 110.0) == (
        "rank 1 (a, pid 11) has stalled the others for 21s; position: step 12, in load (d.py:2); "
        "rank 0 waits in all_reduce over tp"
    )
    # One that waits for rank 0's word in the store is none of those.
    now = [beat(0, like=WORKING), beat(1), beat(2, place=Place("store"))]
    assert judge(old(now), now, 110.0).startswith("rank 0 (a, pid 10) has stalled the others")


def test_a_deadlock_and_a_rank_that_never_spoke():
    now = [beat(0), beat(1, place=replace(IN_PP, collective="recv"))]
    assert judge(old(now), now, 110.0) == (
        "rank 0 waits in all_reduce over tp, rank 1 waits in recv over pp; "
        "no rank is behind: all ranks wait for each other, or the network between them has failed"
    )
    assert (
        judge([None, None], [now[0], None], 110.0) == "no heartbeat yet from rank 1; rank 0 waits in all_reduce over tp"
    )
    assert rank_words([5, 0, 1, 2]) == "ranks 0-2, 5"


def unstarted(store: object) -> RankWatch:
    """A rank's, of two, without its threads."""
    watch = RankWatch.__new__(RankWatch)
    watch._mesh, watch._store, watch._verdict_key = Mesh(torch.device("cpu"), Layout((1, 2, 1, 1))), store, "verdict"
    return watch


def test_the_first_verdict_is_every_ranks():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = [unstarted(store.clone()) for _ in range(2)]
    assert [rank.verdict() for rank in ranks] == [None, None]
    ranks[1].leave_verdict("rank 0 is stuck")
    ranks[0].leave_verdict("the connection was closed")
    assert [rank.verdict() for rank in ranks] == ["rank 0 is stuck"] * 2


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.2)
    watch = unstarted(SimpleNamespace(check=lambda keys: time.sleep(2)))
    before = time.monotonic()
    assert watch.verdict() is None
    assert time.monotonic() - before < 1


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (f"{stack_sampling.PACKAGE}model/trunk.py", "gptlite/model/trunk.py"),
        ("/home/someone/gptlite/train/loop.py", None),  # a folder of the same name is not the package
    ],
)
def test_a_place_says_the_phase_and_the_line(file, said):
    source = "def forward(event):\n    standing.set()\n    hold(event)\ndef evaluate(event):\n    forward(event)\n"
    standing, done = threading.Event(), threading.Event()
    scope = {"standing": standing, "hold": lambda event: event.wait(30)}
    exec(compile(source, file, "exec"), scope)
    thread = threading.Thread(target=scope["evaluate"], args=(done,))
    thread.start()
    standing.wait(30)
    assert thread.ident is not None
    place = stack_sampling.place_of(thread.ident, {})
    done.set()
    thread.join()
    assert place == stack_sampling.Place(words=place.words)  # waits for no other rank
    if said is None:  # nothing of the package is on this stack: the innermost frame is named
        assert "gptlite/train/loop.py" not in place.words
        assert place.words.startswith("evaluation, forward, in ")
    else:
        assert place.words in [f"evaluation, forward, in forward ({said}:{line})" for line in (2, 3)]
    assert stack_sampling.place_of(0, {}) == stack_sampling.Place(words="ended")  # no such thread
