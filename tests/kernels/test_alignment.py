"""The same bits wherever tensors begin in memory, and in place."""

import pytest
import torch

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP32, each
from kernels.test_threads import OPS, Op, assert_same

# Not the cross entropy's: on a GPU it is the alignment that says which thread sums what (test_cross_entropy.py).
ALIGNED = [op for op in OPS if op.__name__ not in ("cross_entropy", "attention")]


@each("dtype", DTYPES, (FP32, BF16))
@pytest.mark.parametrize("op", ALIGNED)
@pytest.mark.parametrize("width", [6, 65, 1030])
@pytest.mark.parametrize("offsets", [(1,), (0, 1), (3, 0, 2, 1)])
def test_any_alignment_gives_the_same_bits(
    backend: Backend, dtype: torch.dtype, op: Op, width: int, offsets: tuple[int, ...]
) -> None:
    assert_same(op(backend.having(offsets=offsets), dtype, 3, width), op(backend, dtype, 3, width))
