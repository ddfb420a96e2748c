"""`gptlite train` in a forked process, which begins with torch and gptlite imported (distributed/ranks.py)."""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NamedTuple

from distributed.ranks import run_ranks


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def train(folder: Path, *arguments: str, timeout: float = 120, **environment: str) -> Ended:
    """The command in a folder, with these variables of the environment besides this process's."""
    command = "trainer.command:run", str(folder), arguments, environment
    (ended,) = run_ranks(1, *command, timeout=timeout, join=False)
    return Ended(*ended)


def run(folder: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """The command in this process."""
    from gptlite.commands.train import main

    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["train.py", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()
