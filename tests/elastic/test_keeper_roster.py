"""Numbers of nodes that stay, words on a change of worlds, and a rank's silence."""

import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from gptlite.errors import ConfigError
from gptlite.satellites.elastic import silence
from gptlite.satellites.elastic.proxy import keeper_folder, keeper_socket
from gptlite.satellites.elastic.roster import Member, Pulse, Roster, WorldChange, merged
from gptlite.satellites.elastic.silence import Silence, cut_connections

NONE = Roster()


def member(node: str, roster: Roster = NONE, **more: object) -> Member:
    return replace(Member(node, 0, 0.0, None, "", "", roster), **more)


def test_numbers_stay_and_a_node_that_is_back_has_its_own() -> None:
    first = merged([member(token) for token in "aabbcc"])
    assert (first.numbers, first.present, first.start) == ({"a": 0, "b": 1, "c": 2}, [0, 1, 2], 1)
    without = merged([member("c", first), member("a", first)])  # b is lost, and the ranks are in another order
    assert {token: without.numbers[token] for token in "ac"} == {"a": 0, "c": 2}
    assert without.present == [0, 2]
    back = merged([member("d"), member("a", without), member("c", without)])  # a new keeper on b's node, as rank 0
    assert (back.numbers["d"], back.present, back.start) == (1, [0, 1, 2], 3)
    more = merged([*(member(token, back) for token in "acd"), member("e")])
    assert more.numbers["e"] == 3


def test_a_roster_is_what_its_notes_say() -> None:
    roster = Roster({"a": 0}, [0], {"data": 2}, "text", 3)
    assert Roster.of({"roster": roster.notes(), "of": "others"}) == roster
    assert Roster.of(None) == Roster.of({"other": 1}) == Roster()


BEFORE = Roster({"a": 0, "b": 1}, [0, 1], {"data": 4, "accumulation": 7}, "", 1)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (
            [member("a", BEFORE, step=4812, time=5.0, lost=6.0, why="no heartbeat of rank 1 for 12 s")],
            "node 1 lost at step 4,812 (no heartbeat of rank 1 for 12 s); 1 node goes on: data 4 -> 2, accumulation 7",
        ),
        (
            [member("a", BEFORE, step=9, time=5.0, lost=6.0), member("b", BEFORE, step=8, gone="killed by SIGKILL")],
            "a rank of node 1 lost at step 9 (killed by SIGKILL); 2 nodes go on: data 4 -> 2, accumulation 7",
        ),
        ([member("a", BEFORE, step=9, time=5.0)], "node 1 left at step 9; 1 node goes on: data 4 -> 2, accumulation 7"),
        (
            [member("a", BEFORE, step=3, time=5.0), member("b", BEFORE), member("c", lost=1.0, gone="x")],
            "node 2 back at step 3: data 4 -> 2, accumulation 7",
        ),
    ],
)
def test_words_on_a_change(members: list[Member], words: str) -> None:
    roster = merged(members)
    change = WorldChange.of(members, roster)
    assert change.words({"data": (4, 2), "accumulation": (7, 7)}, len(roster.present)) == words


def test_the_last_step_is_that_of_the_rank_that_was_last(tmp_path: Path) -> None:
    """A spare has taken a later step once, before the run went back."""
    members = [member("a", BEFORE, step=50, time=1.0), member("b", BEFORE, step=20, time=9.0)]
    assert WorldChange.of(members, merged(members)).step == 20


def test_a_pulse_outlives_its_writer() -> None:
    descriptor = os.memfd_create("pulse")
    assert Pulse(descriptor).read() == (0, 0.0)
    if not (pid := os.fork()):
        Pulse(descriptor).write(7, 1.5)
        os._exit(0)
    os.waitpid(pid, 0)
    assert Pulse(descriptor).read() == (7, 1.5)


class Store:
    """Store of one process, whose `clone` is itself; `silent` makes its calls wait."""

    def __init__(self) -> None:
        self._store, self.running = HashStore(), threading.Event()
        self.running.set()

    def clone(self) -> "Store":
        return self

    def set(self, key: str, value: str) -> None:
        self.running.wait()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOST_SECONDS", 0.6), ("PERIOD", 0.05), ("LOOK_SECONDS", 0.02)):
        monkeypatch.setattr(silence, name, value)
    monkeypatch.setattr(silence.os, "_exit", lambda code: None)  # a loaded machine may look frozen


def until(said: list[str], seconds: float = 20.0) -> list[str]:
    end = time.monotonic() + seconds
    while not said and time.monotonic() < end:
        time.sleep(0.02)
    return said


def test_the_next_rank_is_missed_once_it_is_silent(fast: None) -> None:
    store, said = Store(), []
    one, other = (Silence(store, rank, 2, lambda why, _: said.append(why)) for rank in (0, 1))
    time.sleep(1.5)
    assert said == []
    other.close()
    assert until(said)[0].startswith("no heartbeat of rank 1 for ")
    one.close()


def test_a_rank_that_leaves_tells_all_others_why(fast: None) -> None:
    """Also those that do not watch it: rank 1 watches rank 2."""
    store, said = Store(), []
    ranks = [Silence(store, rank, 3, lambda why, _, rank=rank: said.append((rank, why))) for rank in range(3)]
    time.sleep(0.3)
    assert said == []
    ranks[0].tell("a worker has ended")
    until(said, 5.0)
    time.sleep(0.3)
    assert sorted(said) == [(rank, "a worker has ended") for rank in range(3)]
    for rank in ranks:
        rank.close()


def test_a_store_that_does_not_answer_is_missed(fast: None) -> None:
    store, said = Store(), []
    watch = Silence(store, 0, 2, lambda why, _: said.append(why))
    time.sleep(0.2)
    store.running.clear()
    assert until(said)[0].startswith("no answer of the store for ")
    store.running.set()
    watch.close()


def test_cut_connections_end_a_wait_and_leave_listeners() -> None:
    """In a process of its own, whose connections are all its own."""
    ready, wake = os.pipe()
    if not (pid := os.fork()):
        server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Timer(0.3, cut_connections).start()
            try:
                server.wait(["never"])
            except Exception:
                listener.settimeout(5)
                with socket.create_connection(listener.getsockname()):
                    listener.accept()
                os.write(wake, b"1")
        os._exit(0)
    os.close(wake)
    os.waitpid(pid, 0)
    assert os.read(ready, 1) == b"1"
    os.close(ready)


def test_a_folder_that_others_could_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = keeper_folder()
    assert (folder.parent, str(os.getppid())) == (tmp_path, folder.name.split("-")[2])
    assert keeper_socket(folder) is None
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="is not a folder of this user alone"):
        keeper_socket(folder)
    folder.rmdir()
    (tmp_path / "other").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot be used"):
        keeper_socket(folder)
