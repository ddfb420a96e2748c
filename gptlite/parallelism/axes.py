"""The axes that ranks are laid out along, a row each; whoever goes through the axes reads them here. No torch here.

Most are dimensions of the device mesh. An axis that is folded has none: its ranks are neighbours on other axes.
"""

from dataclasses import dataclass
from typing import Literal

CONTEXT = "cp"
DATA = "dp"  # the kind of both data axes
WORLD = "world"  # all ranks: no axis, but a kind of collective

Alike = Literal["", "all", "uncut", "tied"]


@dataclass(frozen=True)
class Axis:
    """An axis: its name in the mesh, in process groups and in messages, the key of its degree, and what it divides.

    `label` is for people, in a layout's words; empty where those of another axis speak of it. `kind` is its name in
    metrics and hang reports. `over`: the axes that it is folded over, neighbours in the mesh, slowest first; a run of
    their ranks is one of its groups. `factor`: its degree multiplies the world's size, which for a folded axis says
    that its ranks share samples; else it regroups ranks that are there.
    """

    name: str
    key: str  # of `parallelism`
    label: str
    divides: str
    kind: str
    over: tuple[str, ...] = ()
    factor: bool = True
    alike: Alike = ""  # parameters that its ranks have copies of: all, those that tensor.py leaves whole, or tied ones
    files: tuple[str, ...] = ()  # a thread that waits in these, or in these folders, waits for its ranks
    waits: str = "a collective"  # what for, where the thread's stack does not tell


FSDP = ("torch/distributed/fsdp/",)
PIPELINING = ("torch/distributed/pipelining/", "gptlite/parallelism/pipeline.py", "gptlite/parallelism/stage_runner.py")
# Slowest first: the ranks of the last are neighbours.
TABLE: tuple[Axis, ...] = (
    Axis("pp", "pipeline", "pipeline", "the blocks", "pp", alike="tied", files=PIPELINING, waits="send or receive"),
    Axis("dp_replicate", "dp_replicate", "", "the global batch", DATA, factor=False, alike="all", files=FSDP),
    Axis("dp_shard", "data", "data", "the global batch", DATA, files=FSDP),
    Axis(
        *(CONTEXT, "context", "context", "every sequence", CONTEXT),
        over=("dp_replicate", "dp_shard"),
        files=("gptlite/parallelism/context.py",),
    ),
    Axis("tp", "tensor", "tensor", "every matrix", "tp", alike="uncut", files=("gptlite/parallelism/tensor.py",)),
)
AXES = tuple(axis.name for axis in TABLE if not axis.over)  # the dimensions of the mesh
DATA_AXES = tuple(axis.name for axis in TABLE if axis.kind == DATA)


def every_axis() -> tuple[Axis, ...]:
    """All axes, slowest first."""
    return TABLE


def folded() -> tuple[Axis, ...]:
    """The axes that are folded over others."""
    return tuple(axis for axis in TABLE if axis.over)


def kinds() -> dict[str, tuple[str, ...]]:
    """The axes of each kind of collective: the fastest kind first, the data axes' and the world's last."""
    order = sorted(dict.fromkeys(axis.kind for axis in reversed(TABLE)), key=lambda kind: kind == DATA)
    return {kind: tuple(axis.name for axis in TABLE if axis.kind == kind) for kind in order} | {WORLD: AXES}


def alike(parameters: Alike) -> tuple[str, ...]:
    """The names of the axes whose ranks hold those parameters alike."""
    return tuple(axis.name for axis in TABLE if axis.alike == parameters)
