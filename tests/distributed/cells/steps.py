"""Runs of any layout, whole or taken step by step, on every rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from gptlite.config import Config, load
from gptlite.config.cluster import ClusterConfig
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.satellites.certify.fuzz.ranks import joined as group_of
from gptlite.satellites.parity.record import build
from gptlite.satellites.plan.planning import workload_of
from gptlite.satellites.plan.workload import Workload
from gptlite.start.pretrain import pretrain
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step


@contextmanager
def joined(world: int, name: str) -> Iterator[bool]:
    """A process group of the first `world` ranks, none for one; gives whether this rank is of them.

    So ranks started once serve every smaller world too. `name` is one that no other group of theirs has had.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank >= world:
        yield False
        return
    # New ranks may be ready a minute apart on a busy machine; one that hangs is seen by Ranks.run.
    with group_of(rank, world, int(os.environ.get("MASTER_PORT", 0)), name):
        yield True


@contextmanager
def built(config: Config) -> Iterator[tuple[Mesh, TrainState, Step]]:
    """The mesh, state and step of a run, whose groups and loader are gone at the end."""
    mesh = build_mesh(config.parallelism)
    try:
        state, step = build(config, mesh)
        with closing(state.loader):
            yield mesh, state, step
    finally:
        mesh.close()


def planned_work(config: Config, mesh: Mesh, state: TrainState) -> Workload:
    """The run as the plan sees it."""
    return workload_of(replace(config, model=state.model.config), mesh.layout, ClusterConfig(device="cpu"))


def train(overrides: list[str]) -> int:
    """The exit code of a whole run."""
    return pretrain(load(overrides)).exit_code
