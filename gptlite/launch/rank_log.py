"""What the ranks above 0 print: into a file of the run folder, since rank 0 keeps the terminal."""

import os
import sys
from pathlib import Path


def log_path(run_dir: Path, rank: int) -> Path:
    """Where a run folder has a rank's output."""
    return run_dir.absolute() / "ranks" / f"rank-{rank}.log"


class RankLog:
    """This process's output, C++'s included, from now on in a file. `path` is where it is.

    A refused run leaves nothing in the run folder, so the file begins elsewhere and `move` follows once the folder
    stands. `terminal` is where standard error went before.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self.terminal = os.dup(2)
        os.set_inheritable(self.terminal, False)
        self._point_to(path)

    def move(self, run_dir: Path) -> None:
        """Goes on in `log_path(run_dir, rank)`, after what is there already; the file it began in is gone."""
        target = log_path(run_dir, self.rank)
        target.parent.mkdir(exist_ok=True)
        sys.stdout.flush()
        said = self.path.read_bytes()
        with target.open("ab") as file:
            file.write(said)
        self._point_to(target)
        self.path.unlink()
        self.path = target

    def tell(self, text: str) -> None:
        """One line to where the output went before."""
        os.write(self.terminal, (text + "\n").encode())

    def _point_to(self, path: Path) -> None:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        for stream in (sys.stdout, sys.stderr):  # a pipe's would keep lines back
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
