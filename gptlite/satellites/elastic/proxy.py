"""Workers of an elastic run, as torchrun or our launcher starts them: each stands for a rank of its node's keeper.

Imports neither torch nor Hydra, since a worker is started anew at each restart.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from gptlite.errors import ConfigError

VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"  # prefixes
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
SAME_SECONDS = 2.0  # our launcher writes its stop file within this time of a signal
LOOK_SECONDS = 0.05
START_SECONDS = 300.0  # for a keeper's imports, on a slow file system
EXIT_TERMINATED = 143
SOCKET = "keeper"


def keeper_folder() -> Path:
    """Return the folder of the keeper of this process's parent, the launcher: one for each launcher of each user."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]  # proc(5): starttime
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"gptlite-{os.getuid()}-{parent}-{started}"


def keeper_socket(folder: Path) -> socket.socket | None:
    """Return a connection to the keeper in a folder; None if it has not started. Raises ConfigError for a folder that
    another user could write to."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror}; delete it, or set TMPDIR") from None
    try:
        status = os.fstat(place)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise ConfigError(f"{folder} is not a folder of this user alone; delete it, or set TMPDIR")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"/proc/self/fd/{place}/{SOCKET}")  # a socket's own path is at most 107 characters
            return connection
        except OSError:
            connection.close()
            return None
    finally:
        os.close(place)


def go_on(arguments: Sequence[str] = ()) -> None:
    """Stand for a rank of the keeper that an earlier worker of this launcher has started, and exit; return if there is
    none. `arguments` are those of `launched`."""
    with suppress(ConfigError):  # raised again, and printed, by `with_keeper`
        if (connection := keeper_socket(keeper_folder())) is not None:
            stand_for(connection, arguments)


def with_keeper(command: Sequence[str], text: Callable[[], str], arguments: Sequence[str] = ()) -> NoReturn:
    """Start this node's keeper, unless another worker has done so, and stand for one of its ranks.

    `command` are the arguments of Python that start a keeper, to which its folder, a file descriptor and its launcher
    are appended; it reads `text()` from its standard input. It holds the descriptor's lock until workers can connect,
    so that a worker that is started while it imports torch, because this one has been ended, waits for it.
    Raises ConfigError.
    """
    folder = keeper_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if (connection := keeper_socket(folder)) is None:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker to come starts the keeper
            if (connection := keeper_socket(folder)) is None:
                connection = _start(folder, command, text(), lock.fileno())
    stand_for(connection, arguments)


def _start(folder: Path, command: Sequence[str], text: str, lock: int) -> socket.socket:
    words = [sys.executable, *command, str(folder), str(lock), str(os.getppid())]
    # A session of its own: Ctrl-C reaches the workers, which pass it on.
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, text=True, pass_fds=[lock])
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(text)
    until = time.monotonic() + START_SECONDS
    while (connection := keeper_socket(folder)) is None:
        if process.poll() is not None or time.monotonic() > until:
            raise ConfigError(f"the keeper of this node's ranks did not start (exit code {process.poll()})")
        time.sleep(LOOK_SECONDS)
    return connection


def stand_for(connection: socket.socket, arguments: Sequence[str] = ()) -> NoReturn:
    """Hand this worker's place and output to the keeper, pass signals on, and exit with the exit code of the rank.

    With `arguments`, our launcher has started this worker: its signals count only once its stop file is there.
    """
    signals, wake = socket.socketpair()
    wake.setblocking(False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    request = {"variables": variables, "arguments": list(arguments), "words": sys.orig_argv}
    socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [1, 2])
    stop = Path(arguments[0]).parent / "stop" if arguments else None
    code = _relayed(connection, signals, stop)
    if code < 0 and stop is not None and stop.exists():
        code = EXIT_TERMINATED  # of a rank that a request has ended before it trained
    if code < 0:  # killed by a signal, as the launcher should see
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _relayed(connection: socket.socket, signals: socket.socket, stop: Path | None) -> int:
    """Pass signals on until the rank has ended, and return its exit code; the negative number of a signal that has
    killed it."""
    signals.settimeout(0)
    connection.settimeout(LOOK_SECONDS)
    answer, signalled, asked = b"", None, False
    while not answer.endswith(b"\n"):
        try:
            received = connection.recv(64)
            if not received:
                return 1  # the keeper has ended
            answer += received
            continue
        except TimeoutError:
            pass
        try:
            numbers = [number for number in signals.recv(64) if number in SIGNALS]
        except BlockingIOError:
            numbers = []
        if stop is None:
            connection.sendall(b"".join(b"%d\n" % number for number in numbers))
            continue
        if numbers:
            signalled = time.monotonic()
        if not asked and stop.exists():
            asked = True
            connection.sendall(stop.read_bytes() + b"\n")
        if signalled is not None and not asked and time.monotonic() - signalled > SAME_SECONDS:
            return EXIT_TERMINATED  # the launcher ends its ranks, since one has failed
    return int(answer)
