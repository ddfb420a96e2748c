"""Signals of the launcher and of its ranks, without processes. Real ones are in tests/distributed/test_launch.py."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from gptlite.launch import elastic, rank_stop
from gptlite.launch.elastic import Requests, run_once
from gptlite.launch.rank_stop import LauncherStop


@pytest.mark.parametrize("before", [None, signal.SIGTERM])
def test_a_signal_that_ends_the_agent_counts_as_a_request(tmp_path: Path, monkeypatch, before: int | None):
    def launch(*_: str) -> NoReturn:
        raise SignalException("closed terminal", signal.SIGHUP)

    monkeypatch.setattr(elastic, "elastic_launch", lambda *_: launch)
    requests = Requests(tmp_path / "stop")
    requests.received = before
    assert run_once(tmp_path, 1, requests, ()) == {}
    assert (requests.received, requests.insisted) == (before or signal.SIGHUP, True)


def test_a_second_signal_insists_unless_it_is_the_first_again(tmp_path: Path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
    with Requests(tmp_path / "stop") as requests:
        for seconds, insisted in ((0.0, False), (0.5, False), (5.0, True)):
            now[0] = seconds
            signal.raise_signal(signal.SIGTERM)
            assert (requests.received, requests.insisted) == (signal.SIGTERM, insisted)
        with requests.interrupting(), pytest.raises(SignalException):
            signal.raise_signal(signal.SIGTERM)
    assert (tmp_path / "stop").read_text() == f"{int(signal.SIGTERM)}"


class Exited(Exception):
    """The code of os._exit."""


def exit_code_of(watch: Callable[[], None], monkeypatch) -> int:
    def leave(code: int) -> NoReturn:
        raise Exited(code)

    monkeypatch.setattr(rank_stop.os, "_exit", leave)
    with pytest.raises(Exited) as exited:
        watch()
    return exited.value.args[0]


@pytest.mark.parametrize(("waited", "code"), [(4.0, 143), (6.0, 0)])
def test_a_rank_that_does_not_unwind_ends_by_itself(tmp_path: Path, monkeypatch, waited: float, code: int):
    """It has written its result by then. Before, it ends only with its launcher."""
    stop = LauncherStop.__new__(LauncherStop)
    vars(stop).update(_launcher=os.getppid(), _unwinding=True, _signalled=None, _file=tmp_path / "stop")
    vars(stop).update(_lock=rank_stop.threading.RLock(), _noticed=time.monotonic() - waited)

    def the_launcher_ends() -> bool:
        stop._launcher = -1
        return False

    monkeypatch.setattr(stop, "_received_signal", the_launcher_ends)
    assert exit_code_of(stop._watch, monkeypatch) == code
