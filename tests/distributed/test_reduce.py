"""`precision.reduce=compute`: gradients are summed over data ranks in the compute dtype, by default in fp32."""

from unittest import mock

import pytest

from distributed.cells.layouts import BASE
from distributed.cells.run import Ranks
from distributed.cells.steps import built
from gptlite.config import Config, load
from gptlite.parallelism.point_to_point import PairwiseReduceScatter

STEPS = 3


def steps(config: Config) -> tuple[list[float], list[float], set[str], set[str]]:
    """On every rank: losses, gradient norms, the dtypes that gradients are reduced in, and those they end in."""
    reduced: set[str] = set()
    kept: set[str] = set()
    call = PairwiseReduceScatter.__call__

    def seen(this: PairwiseReduceScatter, **given: object) -> None:
        reduced.add(str(given["input_tensor"].dtype))  # type: ignore[attr-defined]
        call(this, **given)  # type: ignore[arg-type]

    with built(config) as (_, state, step), mock.patch.object(PairwiseReduceScatter, "__call__", seen):
        results = [
            step(state, lambda its: kept.update(str(p.grad.dtype) for p in its.weights() if p.grad is not None))
            for _ in range(STEPS)
        ]
    return [each.loss for each in results], [each.grad_norm for each in results], reduced, kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype", "zero"),
    [("bf16", "torch.bfloat16", 1), ("fp16", "torch.float16", 3), ("bf16_stochastic", "torch.bfloat16", 2)],
)
def test_the_dtype_of_sums_is_as_asked_and_steps_stay_close(two: Ranks, precision: str, dtype: str, zero: int):
    """Each gradient is rounded by at most 2^-9 of itself once more, and so is its sum: the norm moves by less."""
    words = [*BASE, f"precision={precision}", "parallelism.data=2", f"parallelism.zero={zero}"]
    words += ["data.micro_batch_size=2"]
    exact = two.run("distributed.test_reduce:steps", load(words), timeout=200)
    low = two.run("distributed.test_reduce:steps", load([*words, "precision.reduce=compute"]), timeout=200)
    assert [each[2] for each in exact] == [{"torch.float32"}] * 2
    assert [each[2] for each in low] == [{dtype}] * 2
    assert [each[3] for each in exact + low] == [{"torch.float32"}] * 4
    assert low[0][:2] == low[1][:2]
    assert low[0][1] != exact[0][1]
    assert low[0][0] == pytest.approx(exact[0][0], rel=2e-3)
    assert low[0][1] == pytest.approx(exact[0][1], rel=2**-7)
