"""What ranks do in test_loss_scale_ranks.py."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from gptlite.config import Config
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.zero import local_tensor
from gptlite.parity.record import build
from gptlite.trainer.state import TrainState


@dataclass(frozen=True)
class Trained:
    """A rank's steps, as (loss scale, skipped, loss), and what it counted."""

    steps: list[tuple[float | None, bool, float]]
    samples: int
    adam: set[float]


def train(config: Config, steps: int, planted: tuple[int, int] | None = None) -> Trained:
    """The first steps of a run; one element of one gradient of a rank is infinite in a step, as (rank, step)."""
    mesh = build_mesh(config.parallelism)
    try:
        state, take_step = build(config, mesh)

        def plant(state: TrainState) -> None:
            if (mesh.rank, state.step) == planted:
                gradient = next(p.grad for p in state.weights() if p.grad is not None and p.ndim > 1)
                local_tensor(gradient).view(-1)[0] = float("inf")

        with closing(state.loader):
            results = [take_step(state, plant) for _ in range(steps)]
        counts = {local_tensor(each["step"]).item() for each in state.optimizer.state.values()}
        return Trained([(r.loss_scale, r.skipped, r.loss) for r in results], state.consumed_samples, counts)
    finally:
        mesh.close()
