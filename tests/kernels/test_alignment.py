"""The same bits wherever tensors begin in memory, and in place."""

import torch

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP32, each
from kernels.loop import loop_over
from kernels.test_threads import OPS, Op, assert_same

# Not the cross entropy's: on a GPU it is the alignment that says which thread sums what (test_cross_entropy.py).
ALIGNED = [op for op in OPS if op.__name__ not in ("cross_entropy", "attention")]


WIDTHS, OFFSETS = (6, 65, 1030), ((1,), (0, 1), (3, 0, 2, 1))
CORE = [(w, o) for w in WIDTHS for o in OFFSETS if w < 1030 or o == OFFSETS[2]]


@each(
    "dtype,width,offsets",
    [(d, w, o) for d in DTYPES for w in WIDTHS for o in OFFSETS],
    [(d, *each) for d in (FP32, BF16) for each in CORE],
)
@loop_over("op", ALIGNED)
def test_any_alignment_gives_the_same_bits(
    backend: Backend, dtype: torch.dtype, width: int, offsets: tuple[int, ...], op: Op
) -> None:
    assert_same(op(backend.having(offsets=offsets), dtype, 3, width), op(backend, dtype, 3, width))
