"""The place of another thread of this process, read from its Python stack: what it runs is not touched or slowed.

A thread that waits for other ranks does so in a few known ways: in a function of torch.distributed, on a line that
calls `.wait()`, or in the store. The files on its stack say along which axis.
"""

import linecache
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import torch

from gptlite.parallelism.axes import WORLD, every_axis

# Files are told by where the packages are: a checkout or a user's own folder may have the same names in its path.
PACKAGE, TORCH = f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/distributed/"
COLLECTIVES = (f"{TORCH}distributed_c10d.py", f"{TORCH}_functional_collectives.py")
STORE = f"{PACKAGE}parallelism/rank_sync.py"  # waits there may take any time
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

    @property
    def waiting_for(self) -> str:
        """`all_reduce over tp`."""
        nameless = next((axis.waits for axis in every_axis() if axis.kind == self.axis), "a collective")
        return f"{self.collective or nameless} over {self.axis}"


def waits_along(thread: int) -> str | None:
    """The axis whose ranks a thread waits for in a collective, by the thread's identifier; None where it does not."""
    frame = sys._current_frames().get(thread)
    return None if frame is None or not _waits(frame.f_code.co_filename, frame.f_lineno or 0) else _axis(frame)


def place_of(thread: int) -> Place:
    """Where a thread stands, by its identifier."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Place(words="ended")
    words, file = _words([each for each, _ in walk_stack(frame)]), frame.f_code.co_filename
    if _waits(file, frame.f_lineno or 0):
        return Place("collective", frame.f_code.co_name if file in COLLECTIVES else "", _axis(frame), words)
    return Place("store" if file == STORE else "", words=words)


@cache
def _waits(file: str, line: int) -> bool:
    """Whether a thread on that line waits in a collective."""
    return file in COLLECTIVES or (file.startswith((TORCH, PACKAGE)) and ".wait()" in linecache.getline(file, line))


def _axis(frame: FrameType) -> str:
    # The first file on the stack, from the inside, that is an axis's; of none: all ranks.
    found = (_axis_of_file(outer.f_code.co_filename) for outer, _ in walk_stack(frame))
    return next(filter(None, found), WORLD)


@cache
def _axis_of_file(file: str) -> str | None:
    """The axis that a file's collectives are along, by the axes' table of files and folders."""
    roots = {"gptlite": Path(PACKAGE), "torch": Path(TORCH).parent}
    for axis in every_axis():
        for name in axis.files:
            package, _, rest = name.partition("/")
            if file.startswith(f"{roots[package]}/{rest}"):
                return axis.kind
    return None


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
