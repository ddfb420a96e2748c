"""The keeper alone: what it does as workers and ranks come and go, and what its ranks leave behind after 20 worlds."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.cells.commands import free_port

from elastic.nodes import TINY, Nodes, children, commands
from gptlite.config.saved import to_yaml
from gptlite.satellites.elastic.proxy import SOCKET, keeper_socket
from gptlite.start.load import load
from gptlite.start.rank import ELASTIC, KEEPER

ROOT = Path(__file__).parents[2]

# A keeper that gives ranks time to leave their world on a busy machine.
PATIENT = f"""{ELASTIC}keep
from gptlite.satellites.elastic import attendance, keeper
keeper.LEAVE_SECONDS = attendance.UNWIND_SECONDS = 15.0
keep(sys.argv[1:])
"""
# Ranks that answer with what their worker's variable says, without torch.
FAKE = """
import json, os, signal, socket, sys, time
from pathlib import Path
from gptlite.satellites.elastic import keeper
keeper.LEAVE_SECONDS = keeper.HOLD_SECONDS = 0.5
def serve(control, shelf, pulse):
    while True:
        messages, fds, _, _ = socket.recv_fds(control, 65536, 2)
        for fd in fds: os.close(fd)
        if (task := json.loads(messages.splitlines()[-1])) == "leave":  # too late
            continue
        print(json.dumps([os.getpid(), task["ended"] and task["ended"]["why"]]), flush=True)
        what = task["variables"]["WHAT"]
        if what == "wait":
            message = control.recv(64)
            control.sendall(b"1\\n")
        elif what == "hang":
            time.sleep(1000)
        else:
            control.sendall(what.encode() + b"\\n")
keeper.Keeper(Path(sys.argv[1]), int(sys.argv[3]), 0, serve).run(int(sys.argv[2]))
"""


class Worker:
    """A worker's connection to a keeper."""

    def __init__(self, folder: Path, local: int = 0, output: Path | None = None, **variables: str) -> None:
        connection = keeper_socket(folder)
        assert connection is not None
        self.socket = connection
        self.socket.settimeout(100)
        request = {"variables": {"LOCAL_RANK": str(local), **variables}, "arguments": [], "words": ["train.py"]}
        with (output or Path(os.devnull)).open("a") as null:
            socket.send_fds(self.socket, [json.dumps(request).encode() + b"\n"], [null.fileno(), null.fileno()])

    def code(self) -> int | None:
        """The exit code of the rank; None if the keeper has not answered."""
        with self.socket:
            answer = self.socket.recv(64)
        return int(answer) if answer else None


class Kept:
    """A keeper whose launcher is a process of the test."""

    def __init__(self, folder: Path, *words: str, text: str = "") -> None:
        self.folder = folder / "keeper"
        self.folder.mkdir(mode=0o700)
        self.launcher = subprocess.Popen(["sleep", "1000"])
        lock = os.open(self.folder, os.O_RDONLY)
        self.process = subprocess.Popen(
            [sys.executable, *words, str(self.folder), str(lock), str(self.launcher.pid)],
            pass_fds=[lock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        os.close(lock)
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(text)
        deadline = time.monotonic() + 100
        while not (self.folder / SOCKET).exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def told(self) -> list[Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path, "-c", FAKE)
    yield kept
    kept.end()


def test_a_rank_serves_one_worker_after_another(fake: Kept) -> None:
    assert Worker(fake.folder, WHAT="0").code() == 0
    pid, ended = fake.told()
    assert ended is None
    assert Worker(fake.folder, WHAT="7").code() == 7
    assert fake.told() == [pid, None]
    assert Worker(fake.folder, local=1, WHAT="0").code() == 0
    assert fake.told()[0] != pid


def test_a_rank_that_is_killed_is_forked_anew(fake: Kept) -> None:
    worker = Worker(fake.folder, WHAT="wait")
    pid, _ = fake.told()
    os.kill(pid, signal.SIGKILL)
    assert worker.code() == -signal.SIGKILL
    assert Worker(fake.folder, WHAT="0").code() == 0
    new, ended = fake.told()
    assert new != pid
    assert ended == "killed by SIGKILL"


def test_a_rank_leaves_when_its_worker_is_gone_or_the_next_comes(fake: Kept) -> None:
    first = Worker(fake.folder, WHAT="wait")
    pid, _ = fake.told()
    second = Worker(fake.folder, WHAT="0")
    assert (first.code(), second.code()) == (1, 0)
    assert fake.told() == [pid, None]  # in the same process
    third = Worker(fake.folder, WHAT="wait")
    assert fake.told() == [pid, None]
    third.socket.close()
    assert Worker(fake.folder, WHAT="0").code() == 0
    assert fake.told() == [pid, None]


def test_a_rank_that_does_not_leave_is_killed(fake: Kept) -> None:
    first = Worker(fake.folder, WHAT="hang")
    pid, _ = fake.told()
    second = Worker(fake.folder, WHAT="0")
    assert (first.code(), second.code()) == (-signal.SIGKILL, 0)
    assert fake.told()[0] != pid


def test_signals_reach_the_rank_and_a_stop_of_others_is_held(fake: Kept) -> None:
    worker = Worker(fake.folder, WHAT="wait")
    fake.told()
    worker.socket.sendall(b"15\n")
    assert worker.code() == -signal.SIGTERM
    begun = time.monotonic()
    assert Worker(fake.folder, WHAT="143").code() == 143  # asked by another node: the launcher has time to notice
    assert time.monotonic() - begun >= 0.5
    first, second = Worker(fake.folder, WHAT="143"), Worker(fake.folder, WHAT="0")  # the next one ends the wait
    assert (first.code(), second.code()) == (143, 0)


def test_the_keeper_and_its_ranks_end_with_the_launcher(fake: Kept) -> None:
    worker = Worker(fake.folder, WHAT="hang")
    pid, _ = fake.told()
    fake.launcher.kill()
    fake.launcher.wait()
    assert worker.code() is None
    fake.process.wait(10)
    assert pid not in [each for each, _ in commands()]
    assert not fake.folder.exists()


def test_a_message_that_is_no_request_is_dropped(fake: Kept) -> None:
    stranger = keeper_socket(fake.folder)
    assert stranger is not None
    with stranger:
        stranger.sendall(b"[]\n")
        assert stranger.recv(1) == b""
    assert Worker(fake.folder, WHAT="0").code() == 0


@pytest.mark.slow
def test_twenty_worlds_leave_nothing_behind_in_a_process(tmp_path: Path) -> None:
    """Most ranks go on in their process, in which threads, descriptors and memory then stay the same.

    Some worlds end a rank: gloo does not end the wait for a send that is in its queue as the connection closes.
    """
    run = Nodes(tmp_path)
    config = load([*TINY, f"run.dir={run.run}", "parallelism.elastic=true", "trainer.max_steps=100000"])
    kept = Kept(tmp_path, *KEEPER[:-1], PATIENT, text=to_yaml(config))
    lives: dict[int, list[tuple[int, int, float]]] = {}  # sizes of a process after its worlds
    try:
        for number in range(20):
            workers = world(kept.folder, 2)
            if number:
                run.wait(lambda: len(run.restarts()) == number)  # noqa: B023
            else:
                run.training(2)
            workers[number % 2].socket.close()
            assert workers[1 - number % 2].code() == 1
            for pid in children(kept.process.pid):
                lives.setdefault(pid, []).append(size(pid))
    finally:
        kept.end()
    longest = max(lives.values(), key=len)
    assert len(lives) <= 10, lives  # 40 without ranks that go on
    assert len(longest) >= 6, lives
    threads, files, memory = longest[2]
    assert longest[-1][0] <= threads, longest
    assert longest[-1][1] <= files, longest
    assert longest[-1][2] < 1.05 * memory + 8e6, longest


def size(pid: int) -> tuple[int, int, float]:
    """Threads, descriptors and resident bytes of a rank that waits for its next world."""
    folder = Path(f"/proc/{pid}")
    time.sleep(0.3)
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return len(os.listdir(folder / "task")), len(os.listdir(folder / "fd")), resident


def world(folder: Path, ranks: int, output: Path | None = None) -> list[Worker]:
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = free_port()
    return [Worker(folder, rank, output, RANK=str(rank), **shared) for rank in range(ranks)]


@pytest.mark.slow
def test_ranks_beyond_the_largest_layout_wait_for_the_end_of_the_run(tmp_path: Path) -> None:
    """Three ranks for tensor=2, and one, which is too few."""
    run = Nodes(tmp_path)
    words = [*TINY, f"run.dir={run.run}", "parallelism.elastic=true", "parallelism.tensor=2", "trainer.max_steps=3"]
    kept = Kept(tmp_path, *KEEPER, text=to_yaml(load([*words, "parallelism.timeout_seconds=5"])))
    try:
        output = tmp_path / "output"
        (alone,) = world(kept.folder, 1, output)
        assert alone.code() == 1
        assert "too few ranks (1) for parallelism.tensor x pipeline x context = 2; waiting up to" in output.read_text()
        assert not run.run.exists()
        assert [worker.code() for worker in world(kept.folder, 3)] == [0, 0, 0]
        assert max(run.losses()) == 3
        assert json.loads((run.run / "result.json").read_text())["world_size"] == 2
    finally:
        kept.end()


def test_a_process_whose_join_has_failed_joins_the_next_world() -> None:
    """torch counts the group that has failed, and ranks with different counts would wait for each other."""
    code = """
import torch.distributed as dist
from datetime import timedelta
from torch.distributed import HashStore
from gptlite.torch_private.distributed import abandon_groups
try:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.3))
except dist.DistError:
    abandon_groups()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    print(dist.group.WORLD.group_name)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "0\n", result.stderr
