"""Sampling of another thread's Python stack, without interrupting or slowing it.

A thread waits for other ranks in one of a few known places: a function of torch.distributed, a line that calls
`.wait()`, or rank_sync.py, which polls the store. The process group of the function identifies the axis whose ranks it
waits for. A line that calls `.wait()` has no group, and an axis over all ranks has the group of the world: then the
files on the stack decide.
"""

import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import torch.distributed as dist

from gptlite.parallelism.axes import DATA, EXPERT_DATA_AXES, WORLD, every_axis
from gptlite.parallelism.mesh import Mesh
from gptlite.torch_private.flight_recorder import BACKWARD, COLLECTIVES, DISTRIBUTED

# Absolute prefixes, since a checkout or a user's folder may have the same names in its path.
PACKAGE = f"{Path(__file__).parents[2]}/"
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


def axes_of_groups(mesh: Mesh) -> dict[str, str]:
    """Return `{name of a process group: kind of its axis}`. Of axes that share a group, the first one counts."""
    axes = {axis.name: axis.kind for axis in every_axis()} | dict.fromkeys(EXPERT_DATA_AXES, DATA)
    return {group.group_name: axes[name] for name, group in reversed((mesh.groups() | mesh.expert_groups()).items())}


def waits_along(thread: int, groups: Mapping[str, str]) -> str | None:
    """Return the axis of the collective in which the thread with this identifier waits; None if it does not wait in a
    collective. `groups` are those of `axes_of_groups`."""
    frame = sys._current_frames().get(thread)
    return None if frame is None or not _waits(frame.f_code.co_filename, frame.f_lineno or 0) else _axis(frame, groups)


def place_of(thread: int, groups: Mapping[str, str]) -> Place:
    """Return the position of the thread with this identifier. `groups` are those of `axes_of_groups`."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Place(words="ended")
    words, file = _words([each for each, _ in walk_stack(frame)]), frame.f_code.co_filename
    if _waits(file, frame.f_lineno or 0):
        return Place("collective", frame.f_code.co_name if file in COLLECTIVES else "", _axis(frame, groups), words)
    return Place("store" if file == STORE else "", words=words)


@cache
def _waits(file: str, line: int) -> bool:
    """Return True if a thread on that line waits in a collective."""
    calls = file.startswith((DISTRIBUTED, PACKAGE))
    return file in COLLECTIVES or (calls and ".wait()" in linecache.getline(file, line))


def _axis(frame: FrameType, groups: Mapping[str, str]) -> str:
    frames = [outer for outer, _ in walk_stack(frame)]
    inside = list(takewhile(lambda each: _is_collective(each.f_code.co_filename), frames))
    group, world = next(filter(None, map(_group_of, inside)), None), _group_name(None)
    if group is not None and group != world and group in groups:
        return groups[group]
    axes = [_axis_of_file(each.f_code.co_filename) for each in frames[len(inside) :]]
    # Every collective of a pass runs below the pipeline, so its files count only if they wait themselves.
    axis = next(filter(None, [*axes[:1], *(each for each in axes[1:] if each != "pp")]), WORLD)
    return WORLD if group is not None and group == world and groups.get(group) != axis else axis


@cache
def _is_collective(file: str) -> bool:
    """Return True for a file in the folder of torch.distributed itself, as opposed to those of FSDP2 or pipelines."""
    return f"{Path(file).parent}/" == DISTRIBUTED


def _group_of(frame: FrameType) -> str | None:
    """Return the name of the process group of a function of torch.distributed; None if the function has no group."""
    # Only of these functions, which are short: reading the variables of a frame keeps them alive until it ends.
    variables = frame.f_locals
    return _group_name(variables["group"]) if "group" in variables else None


def _group_name(group: object) -> str | None:
    """Return the name of a group; None stands for the group of the world."""
    group = dist.group.WORLD if group is None else group
    return group.group_name if isinstance(group, dist.ProcessGroup) else None


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
