"""Training in a rank that the launcher has started."""

from functools import partial
from pathlib import Path
from typing import NoReturn

from gptlite.launch import worker

# Ranks import the same package as this process, even if another version is installed or is in the working directory.
HOME = str(Path(__file__).parents[2])
START = f"""\
import sys
if {HOME!r} not in sys.path:
    sys.path.insert(0, {HOME!r})
from gptlite.start.rank import main
main(sys.argv[1:])
"""
# Of elastic runs: the arguments of Python that start a keeper, and the program of a worker of our launcher.
ELASTIC = f"import sys; {HOME!r} in sys.path or sys.path.insert(0, {HOME!r}); from gptlite.start.elastic import "
KEEPER = "-P", "-u", "-c", ELASTIC + "keep; keep(sys.argv[1:])"
WORKER = ELASTIC + "work; work(sys.argv[1:])"


def main(arguments: list[str]) -> NoReturn:
    """Train in the rank given by the variable RANK. The arguments are those of `worker.main`."""
    worker.main(arguments, partial(exit_code, Path(arguments[0])))


def exit_code(folder: Path, *arguments: object) -> int:
    """Train, and return only the exit code. `folder` has the banner's words on memory."""
    from gptlite.start.pretrain import pretrain  # once worker.main has set what torch reads when it is imported

    memory = (folder / worker.MEMORY).read_text(encoding="utf-8")
    return pretrain(*arguments, memory=memory).exit_code  # type: ignore[arg-type]
