"""`precision.reduce=compute`: gradients are summed over data ranks in the compute dtype, by default in fp32."""

from collections.abc import Iterator

import pytest

from distributed.cell import BASE
from distributed.ranks import Ranks
from gptlite.config import load


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("precision", "dtype", "zero"),
    [
        pytest.param("bf16", "torch.bfloat16", 1, marks=SLOW),
        pytest.param("fp16", "torch.float16", 3, marks=SLOW),
        pytest.param("bf16_stochastic", "torch.bfloat16", 2, marks=SLOW),
    ],
)
def test_the_dtype_of_sums_is_as_asked_and_steps_stay_close(pair: Ranks, precision: str, dtype: str, zero: int):
    """Each gradient is rounded by at most 2^-9 of itself once more, and so is its sum: the norm moves by less."""
    words = [*BASE, f"precision={precision}", "parallelism.data=2", f"parallelism.zero={zero}"]
    words += ["data.micro_batch_size=2"]
    exact = pair.run("distributed.reduce_cases:steps", load(words), timeout=200)
    low = pair.run("distributed.reduce_cases:steps", load([*words, "precision.reduce=compute"]), timeout=200)
    assert [each[2] for each in exact] == [{"torch.float32"}] * 2
    assert [each[2] for each in low] == [{dtype}] * 2
    assert [each[3] for each in exact + low] == [{"torch.float32"}] * 4
    assert low[0][:2] == low[1][:2]
    assert low[0][1] != exact[0][1]
    assert low[0][0] == pytest.approx(exact[0][0], rel=2e-3)
    assert low[0][1] == pytest.approx(exact[0][1], rel=2**-7)
