"""Where another thread of this process stands, read from its Python stack: what it runs is not touched or slowed.

A thread that waits for other ranks does so in a few known ways: in a function of torch.distributed, on a line that
calls `.wait()`, or in the store. The files on its stack say along which axis.
"""

import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from gptlite.parallelism.axes import WORLD, every_axis

# Files are told by where the packages are: a checkout or a user's own folder may have the same names in its path.
PACKAGE, TORCH = f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/distributed/"
COLLECTIVES = (f"{TORCH}distributed_c10d.py", f"{TORCH}_functional_collectives.py")
STORE = f"{PACKAGE}parallelism/main_rank.py"  # waits there may take any time
# What a function on the stack says of the phase, from the outside in; after "backward" nothing more is said.
PHASES = {
    "prepare": "preparing data",
    "restore": "loading a checkpoint",
    "save": "saving a checkpoint",
    "evaluate": "evaluation",
    "generate": "generation",
    "forward": "forward",
    "_engine_run_backward": "backward",
    "backward_weight_one_chunk": "backward",
}


@dataclass(frozen=True)
class Place:
    """Where a thread stands. `waits`: "collective", "store", or "" where it does not wait for other ranks.

    `collective` is its name, "" where the stack does not tell; `axis` a kind of axis, or world; `words` the phase and
    the line.
    """

    waits: str = ""
    collective: str = ""
    axis: str = ""
    words: str = ""


def waits_along(thread: int) -> str | None:
    """The axis whose ranks a thread waits for in a collective, by the thread's identifier; None where it does not."""
    frame = sys._current_frames().get(thread)
    return None if frame is None or not _in_collective(frame) else _axis(frame)


def place_of(thread: int) -> Place:
    """Where a thread stands, by its identifier."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Place(words="ended")
    words = _words(list(_outwards(frame)))
    if _in_collective(frame):
        own_name = frame.f_code.co_filename in COLLECTIVES
        return Place("collective", frame.f_code.co_name if own_name else "", _axis(frame), words)
    return Place("store" if frame.f_code.co_filename == STORE else "", words=words)


def _in_collective(frame: FrameType) -> bool:
    return _waits_on_line(frame.f_code.co_filename, frame.f_lineno)


@cache
def _waits_on_line(file: str, line: int | None) -> bool:
    if file in COLLECTIVES:
        return True
    return file.startswith((TORCH, PACKAGE)) and ".wait()" in linecache.getline(file, line or 0)


def _axis(frame: FrameType) -> str:
    # The first file on the stack, from the inside, that is an axis's; of none: all ranks.
    for outer in _outwards(frame):
        if axis := _axis_of_file(outer.f_code.co_filename):
            return axis
    return WORLD


@cache
def _axis_of_file(file: str) -> str | None:
    return next((axis.kind for axis in every_axis() if file.startswith(tuple(map(_path, axis.files)))), None)


def _path(file: str) -> str:
    """Where a file or folder of the axes' table is."""
    package, _, rest = file.partition("/")
    return (PACKAGE if package == "gptlite" else TORCH.removesuffix("distributed/")) + rest


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _words(frames: list[FrameType]) -> str:
    """`backward, in Trunk.fold (gptlite/model/trunk.py:9)`: the phase, and the innermost line of ours."""
    phases: list[str] = []
    for frame in reversed(frames):
        phase = PHASES.get(frame.f_code.co_name)
        if phase and phase not in phases:
            phases.append(phase)
        if phase == "backward":
            break
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(PACKAGE)]
    here = (ours or frames)[0]
    file = here.f_code.co_filename
    short = f"gptlite/{file.removeprefix(PACKAGE)}" if ours else file
    return ", ".join([*phases, f"in {here.f_code.co_qualname} ({short}:{here.f_lineno})"])
