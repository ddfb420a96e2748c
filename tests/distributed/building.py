"""Runs of any layout that a test takes step by step, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from gptlite.config import Config
from gptlite.config.cluster import ClusterConfig
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parity.record import build
from gptlite.plan.planning import workload_of
from gptlite.plan.workload import Workload
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step


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
