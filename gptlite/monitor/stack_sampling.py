"""Sampling of another thread's Python stack, without interrupting or slowing it.

A thread waits for other ranks in one of a few known places: a function of torch.distributed, a line that calls
`.wait()`, or rank_sync.py, which polls the store. The files on its stack identify the axis whose ranks it waits for.
"""

import linecache
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import FrameType

from gptlite.parallelism.axes import WORLD, every_axis
from gptlite.torch_private.frames import BACKWARD, COLLECTIVES, DISTRIBUTED

# Absolute prefixes, since a checkout or a user's folder may have the same names in its path.
PACKAGE = f"{Path(__file__).parents[1]}/"
STORE = f"{PACKAGE}parallelism/rank_sync.py"  # waits there have no time limit
# Phase by function name. The stack is searched from the outermost frame inwards, as far as "backward".
PHASES = {
    "prepare": "preparing data",
    "restore": "loading a checkpoint",
    "save": "saving a checkpoint",
    "evaluate": "evaluation",
    "generate": "generation",
    "forward": "forward",
    BACKWARD: "backward",
    "backward_weight_one_chunk": "backward",
}


@dataclass(frozen=True)
class Place:
    """Position of a thread. `waits` is "collective", "store", or "" if it does not wait for other ranks.

    `collective` is the collective's name, or "" if the stack does not show it. `axis` is a kind of axis, or world.
    `words` is a description of the phase and the source line.
    """

    waits: str = ""
    collective: str = ""
    axis: str = ""
    words: str = ""

    @property
    def waiting_for(self) -> str:
        """Return e.g. `all_reduce over tp`."""
        nameless = next((axis.waits for axis in every_axis() if axis.kind == self.axis), "a collective")
        return f"{self.collective or nameless} over {self.axis}"


def waits_along(thread: int) -> str | None:
    """Return the axis of the collective in which the thread with this identifier waits; None if it does not wait in a
    collective."""
    frame = sys._current_frames().get(thread)
    return None if frame is None or not _waits(frame.f_code.co_filename, frame.f_lineno or 0) else _axis(frame)


def place_of(thread: int) -> Place:
    """Return the position of the thread with this identifier."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Place(words="ended")
    words, file = _words([each for each, _ in walk_stack(frame)]), frame.f_code.co_filename
    if _waits(file, frame.f_lineno or 0):
        return Place("collective", frame.f_code.co_name if file in COLLECTIVES else "", _axis(frame), words)
    return Place("store" if file == STORE else "", words=words)


@cache
def _waits(file: str, line: int) -> bool:
    """Return True if a thread on that line waits in a collective."""
    calls = file.startswith((DISTRIBUTED, PACKAGE))
    return file in COLLECTIVES or (calls and ".wait()" in linecache.getline(file, line))


def _axis(frame: FrameType) -> str:
    # The axis of the innermost file on the stack that belongs to one; the world if no file does.
    found = (_axis_of_file(outer.f_code.co_filename) for outer, _ in walk_stack(frame))
    return next(filter(None, found), WORLD)


@cache
def _axis_of_file(file: str) -> str | None:
    """Return the kind of the axis whose collectives are issued from this file, according to the axis table; None if no
    axis lists the file."""
    roots = {"gptlite": Path(PACKAGE), "torch": Path(DISTRIBUTED).parent}
    for axis in every_axis():
        for name in axis.files:
            package, _, rest = name.partition("/")
            if file.startswith(f"{roots[package]}/{rest}"):
                return axis.kind
    return None


def _words(frames: list[FrameType]) -> str:
    """Return the phase and the innermost line of this package, e.g. `forward, in Block.forward
    (gptlite/models/gpt/model.py:99)`."""
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
