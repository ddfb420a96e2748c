"""Where another thread of this process stands, read from its Python stack: what it runs is not touched or slowed.

A thread that waits for other ranks does so in a few known ways: in a function of torch.distributed, on a line that
calls `.wait()`, or in the store. The files on its stack say along which axis.
"""

import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import FrameType

COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
STORE = "gptlite/parallelism/main_rank.py"  # waits there may take any time
# The first of these files on the stack, from the inside, says the axis; of none: all ranks.
AXIS_FILES = {
    "torch/distributed/fsdp/": "dp",
    "torch/distributed/pipelining/": "pp",
    "gptlite/parallelism/pipeline.py": "pp",
    "gptlite/parallelism/chain.py": "pp",
    "gptlite/parallelism/tensor.py": "tp",
    "gptlite/parallelism/context.py": "cp",
}
WORLD = "world"
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

    `collective` is its name, "" where the stack does not tell; `axis` tp, cp, pp, dp or world; `words` the phase and
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
        own_name = _is_in(frame.f_code.co_filename, COLLECTIVES)
        return Place("collective", frame.f_code.co_name if own_name else "", _axis(frame), words)
    return Place("store" if _is_in(frame.f_code.co_filename, (STORE,)) else "", words=words)


def _in_collective(frame: FrameType) -> bool:
    return _waits_on_line(frame.f_code.co_filename, frame.f_lineno)


@cache
def _waits_on_line(file: str, line: int | None) -> bool:
    if _is_in(file, COLLECTIVES):
        return True
    return _is_in(file, ("torch/distributed/", "gptlite/")) and ".wait()" in linecache.getline(file, line or 0)


def _axis(frame: FrameType) -> str:
    for outer in _outwards(frame):
        if axis := _axis_of_file(outer.f_code.co_filename):
            return axis
    return WORLD


@cache
def _axis_of_file(file: str) -> str | None:
    return next((axis for part, axis in AXIS_FILES.items() if part in file), None)


@cache
def _is_in(file: str, places: tuple[str, ...]) -> bool:
    return any(place in file for place in places)


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
    ours = [frame for frame in frames if "gptlite/" in frame.f_code.co_filename]
    here = (ours or frames)[0]
    file = here.f_code.co_filename
    short = file[file.rfind("gptlite/") :] if ours else file
    return ", ".join([*phases, f"in {here.f_code.co_qualname} ({short}:{here.f_lineno})"])
