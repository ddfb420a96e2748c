"""Commands that start ranks, for the tests of launching: found again by a mark, and ended with the test."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

from run_files import read_metrics

HERE = Path(__file__).parent
TRAIN = str(HERE.parents[2] / "train.py")
RANK = str(HERE / "launch_rank.py")
OUTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Start = Callable[..., "Run"]


class Run:
    """A command in a session of its own, whose processes can be found by a mark in their environment."""

    def __init__(
        self, command: list[str], folder: Path, env: dict[str, str], stdout: int = PIPE, stderr: int = PIPE
    ) -> None:
        self.mark = f"LAUNCH_TEST={uuid.uuid4()}"
        name, value = self.mark.split("=")
        clean = {key: text for key, text in os.environ.items() if key not in OUTER and not key.startswith("SLURM_")}
        self.process = subprocess.Popen(
            command,
            env=clean | {"OMP_NUM_THREADS": "1", name: value} | env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def end(self, timeout: float = 120) -> tuple[int, str, str]:
        """Waits; gives the exit code, standard output and standard error, after seeing that nothing is left."""
        output, errors = self.process.communicate(timeout=timeout)
        assert self.left() == [], errors
        return self.process.returncode, output, errors

    def left(self) -> list[int]:
        """Processes of this command that still run, but for itself."""
        return [pid for pid in self._marked(self.mark) if pid != self.process.pid]

    def rank(self, number: int) -> int:
        """The process of a rank."""
        (pid,) = self._marked(self.mark, f"RANK={number}")
        return pid

    def _marked(self, *variables: str) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and "\nState:\tZ" not in (folder / "status").read_text():
                    env = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                    found += [int(folder.name)] if set(variables) <= set(env) else []
        return found

    def until(self, *paths: Path, timeout: float = 90) -> None:
        """Waits for files."""
        self.wait_for(lambda: all(path.exists() for path in paths), timeout)

    def wait_for(self, done: Callable[[], bool], timeout: float = 90) -> None:
        """Waits until something is so, while the command runs."""
        deadline = time.monotonic() + timeout
        while not done():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        for pid in [self.process.pid, *self.left()] if self.process.poll() is None else self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


def training(folder: Path) -> list[Path]:
    return [folder / "run" / f"training-{rank}" for rank in (0, 1)]


def free_port() -> str:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def seconds_since(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def losses(folder: Path) -> dict[int, float]:
    """By step; what a run that went on from a checkpoint repeated counts once."""
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
