"""Addresses at which ranks cannot meet are refused in seconds, where torch would try to connect for minutes."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest

from gptlite.errors import ConfigError
from gptlite.launch import rendezvous
from gptlite.parallelism import process_group

# `unshare --net` makes a network whose loopback interface is down.
NEW_NETWORK = [shutil.which("unshare") or "unshare", "--net"]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch):
    """Sets the variables of rank 0 of two, at an address."""

    def place(host: str, port: int) -> None:
        given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        for name, value in {**given, "MASTER_ADDR": host, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    return place


def test_loopback_works() -> None:
    rendezvous.refuse_no_loopback()


@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run([*NEW_NETWORK, "true"], check=False, capture_output=True).returncode != 0,
    reason="cannot make a network without loopback",
)
@pytest.mark.slow
def test_a_machine_without_loopback_is_refused_in_seconds() -> None:
    code = "from gptlite.launch.rendezvous import refuse_no_loopback; refuse_no_loopback()"
    found = subprocess.run(
        [*NEW_NETWORK, sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert "127.0.0.1, which does not work here: Network is unreachable; enable" in found.stderr


def test_a_loopback_that_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(rendezvous.socket, "create_connection", refuse)
    with pytest.raises(ConfigError, match=r"through 127\.0\.0\.1, .*: Network is unreachable; enable the loopback"):
        rendezvous.LoopbackRendezvous(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 70])
def test_an_address_that_does_not_resolve_is_refused(rank, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(process_group, "RESOLVE_SECONDS", 0.0)
    rank(host, 1)
    with pytest.raises(ConfigError, match=f"^MASTER_ADDR={host} does not resolve: .*; set it to the name or address"):
        process_group.join(1.0)


def test_rank_0s_port_must_be_free_unless_a_launcher_listens_on_it(rank, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        rank("127.0.0.1", port)
        for name, refusal in (
            ("TORCHELASTIC_USE_AGENT_STORE", nullcontext()),
            ("", pytest.raises(ConfigError, match=f"^MASTER_PORT={port} .* already in use; set another MASTER_PORT")),
        ):
            with monkeypatch.context() as patch, refusal:
                if name:
                    patch.setenv(name, "True")
                process_group._refuse_address()
