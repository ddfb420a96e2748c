"""Log files for the output of all ranks except rank 0, which prints to the terminal."""

import os
import sys
from pathlib import Path
from typing import IO

from gptlite.errors import printable
from gptlite.files import make_inside, open_inside


def log_path(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's log in a run folder."""
    return run_dir.absolute() / "ranks" / f"rank-{rank}.log"


class RankLog:
    """Redirection of this process's output, including that of C++ code, to a file at `path`.

    The file is first outside the run folder, since a refused run must not write there. `move` moves the file once the
    run folder exists. `terminal` is a file descriptor of the previous standard error.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.terminal = os.dup(2)
        os.set_inheritable(self.terminal, False)  # child processes must not hold the terminal or pipe open
        with path.open("ab") as file:
            self._point_to(file)

    def move(self, run_dir: Path) -> None:
        """Continue in `log_path(run_dir, rank)`, appending the earlier output, and delete the first file."""
        target = log_path(run_dir, self.rank)
        make_inside(run_dir.absolute(), target.parent.name)
        sys.stdout.flush()  # into the first file, before it is read
        said = self.path.read_bytes()
        with open_inside(run_dir.absolute(), target, "ab") as file:
            file.write(said)
            self._point_to(file)
        self.path.unlink()
        self.path = target

    def tell(self, text: str) -> None:
        """Print a line to the previous standard error."""
        line = printable(text) + "\n"
        os.write(self.terminal, line.encode())  # one call, so that lines of several ranks do not mix

    def _point_to(self, file: IO[bytes]) -> None:
        file.flush()
        for standard in (1, 2):  # file descriptors, since C++ code does not write to sys.stdout
            os.dup2(file.fileno(), standard)
        for stream in (sys.stdout, sys.stderr):  # a stream that started as a pipe is block-buffered
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
