"""What ranks do in test_reduce.py: steps of a run, and in which dtype its gradients are summed."""

from contextlib import closing
from unittest import mock

from gptlite.config import Config
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.point_to_point import PairwiseReduceScatter
from gptlite.parity.record import build

STEPS = 3


def steps(config: Config) -> tuple[list[float], list[float], set[str], set[str]]:
    """On every rank: losses, gradient norms, the dtypes that gradients are reduced in, and those they end in."""
    reduced: set[str] = set()
    kept: set[str] = set()
    call = PairwiseReduceScatter.__call__

    def seen(this: PairwiseReduceScatter, **given: object) -> None:
        reduced.add(str(given["input_tensor"].dtype))  # type: ignore[attr-defined]
        call(this, **given)  # type: ignore[arg-type]

    mesh = build_mesh(config.parallelism)
    try:
        state, step = build(config, mesh)
        with closing(state.loader), mock.patch.object(PairwiseReduceScatter, "__call__", seen):
            results = [
                step(state, lambda its: kept.update(str(p.grad.dtype) for p in its.weights() if p.grad is not None))
                for _ in range(STEPS)
            ]
        return [each.loss for each in results], [each.grad_norm for each in results], reduced, kept
    finally:
        mesh.close()
