"""Table of parallelism axes, one row per axis, used by all code that iterates over axes. Does not import torch.

Most axes are dimensions of the device mesh. A folded axis has no dimension of its own: each of its groups consists of
neighbouring ranks on other axes.
"""

from dataclasses import dataclass
from typing import Literal

CONTEXT, EXPERT = "cp", "ep"
DATA = "dp"  # the kind of both data axes
WORLD = "world"  # all ranks: a kind of collective, not an axis

Alike = Literal["", "all", "uncut", "tied"]


@dataclass(frozen=True)
class Axis:
    """Parallelism axis: its name in the mesh and in messages, the config key of its degree, and what it divides.

    `label` is the name shown in layout descriptions; empty if another axis's label covers it. `kind` is its name in
    metrics and hang reports. `over` lists the axes that this one is folded over, slowest first. They are adjacent in
    the mesh, and each group of this axis is a run of consecutive ranks along them. `factor` is True if the degree at
    `key` multiplies the world size; if such an axis is folded, its ranks share samples. Otherwise the axis regroups
    existing ranks.
    """

    name: str
    key: str  # of `parallelism`
    label: str
    divides: str
    kind: str
    over: tuple[str, ...] = ()
    factor: bool = True
    alike: Alike = ""  # parameters replicated over its ranks: none, all, those not sharded by tensor.py, or tied ones
    files: tuple[str, ...] = ()  # source files or folders; a wait in them without a process group is along this axis
    waits: str = "a collective"  # the operation to report if the thread's stack does not name it


FSDP = ("torch/distributed/fsdp/",)
PIPELINING = ("torch/distributed/pipelining/", "gptlite/parallelism/pipeline.py", "gptlite/parallelism/stage_runner.py")
GATHERING = ("gptlite/parallelism/context.py",)
EXPERTS = ("gptlite/parallelism/expert.py", "gptlite/models/experts.py")
DATA_RANKS = ("dp_replicate", "dp_shard")
# Slowest first: ranks that are neighbours on the last axis have consecutive numbers.
TABLE: tuple[Axis, ...] = (
    Axis("pp", "pipeline", "pipeline", "the blocks", "pp", alike="tied", files=PIPELINING, waits="send or receive"),
    Axis("dp_replicate", "dp_replicate", "", "the global batch", DATA, factor=False, alike="all", files=FSDP),
    Axis("dp_shard", "data", "data", "the global batch", DATA, files=FSDP),
    Axis(CONTEXT, "context", "context", "every sequence", CONTEXT, over=DATA_RANKS, files=GATHERING),
    Axis(EXPERT, "expert", "expert", "the experts", EXPERT, DATA_RANKS, False, files=EXPERTS, waits="tokens"),
    Axis("tp", "tensor", "tensor", "every matrix", "tp", alike="uncut", files=("gptlite/parallelism/tensor.py",)),
)
AXES = tuple(axis.name for axis in TABLE if not axis.over)  # the dimensions of the mesh
DATA_AXES = tuple(axis.name for axis in TABLE if axis.kind == DATA)
# Dimensions of a second mesh over the same ranks, for the parameters of experts. The data ranks that hold the same
# experts replicate or shard them, as the data axes do with other parameters.
EXPERT_DATA_AXES = "edp_replicate", "edp_shard"
EXPERT_AXES = ("pp", *EXPERT_DATA_AXES, EXPERT, "tp")


def every_axis() -> tuple[Axis, ...]:
    """Return all axes, slowest first."""
    return TABLE


def folded() -> tuple[Axis, ...]:
    """Return the axes that are folded over others."""
    return tuple(axis for axis in TABLE if axis.over)


def kinds() -> dict[str, tuple[str, ...]]:
    """Return `{kind of collective: axes}`, in reverse order of the table, but with the data axes and the world last."""
    # A stable sort on a boolean: it keeps the order of the other kinds and moves the data axes to the end.
    order = sorted(dict.fromkeys(axis.kind for axis in reversed(TABLE)), key=lambda kind: kind == DATA)
    return {kind: tuple(axis.name for axis in TABLE if axis.kind == kind) for kind in order} | {WORLD: AXES}


def alike(parameters: Alike) -> tuple[str, ...]:
    """Return the names of the axes over whose ranks this kind of parameters is replicated."""
    return tuple(axis.name for axis in TABLE if axis.alike == parameters)
