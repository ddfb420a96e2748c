"""The packed gradient of q, k and v against its parts, bit by bit, and the bias's against float64."""

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP16, FP32, each, normal, of_dtypes, on, same_bits
from kernels.tolerances import ARITHMETIC, check

TOLERANCE = ARITHMETIC["join_heads"]
Size = tuple[int, int, int, int]  # tokens, groups, queries of a group, width


def parts_of(size: Size, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, no two elements near each other the same."""
    tokens, groups, queries, width = size
    shapes = (tokens, groups * queries, width), (tokens, groups, width), (tokens, groups, width)
    dq, dk, dv = (normal(shape, dtype, name) for shape, name in zip(shapes, ("dq", "dk", "dv"), strict=True))
    return dq, dk, dv


def packed_of(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """Group after group: its queries, its key, its value."""
    tokens, groups, width = dk.shape
    queries = dq.view(tokens, groups, -1, width)
    return torch.cat([queries, dk.unsqueeze(2), dv.unsqueeze(2)], 2)


def check_both(backend: Backend, size: Size, dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    parts = parts_of(size, dtype)
    dqkv, dbias = backend.join_heads(*parts, bias_dtype)
    assert same_bits(dqkv, packed_of(*parts))
    assert (dbias is None) == (bias_dtype is None)
    if dbias is not None:
        assert dbias.dtype == bias_dtype
        rows = packed_of(*parts).flatten(1).double()
        check("dbias", dbias, rows.sum(0), rows.abs().sum(0), TOLERANCE)


SIZES: list[Size] = [(3, 2, 3, width) for width in (1, 2, 7, 8, 16, 33, 64, 80, 96, 127, 128, 256)]
SIZES += [(1, 1, 1, 64), (70, 3, 1, 16), (600, 1, 1, 4), (300, 1, 4, 16), (1030, 2, 1, 8), (5, 12, 1, 64)]
CORE: list[Size] = [(3, 2, 3, 64), (5, 1, 1, 66), (1030, 1, 2, 8), (70, 3, 1, 16), (2, 1, 1, 1), (2, 43, 1, 64)]


@each(
    "size,dtype",
    [(size, dtype) for size in SIZES for dtype in DTYPES],
    [(size, DTYPES[i % 3]) for i, size in enumerate(CORE)],
)
def test_sizes(backend: Backend, size: Size, dtype: torch.dtype) -> None:
    check_both(backend, size, dtype, FP32)


@on()
@of_dtypes((BF16, FP16))
def test_a_bias_of_16_bits_or_none(backend: Backend, dtype: torch.dtype) -> None:
    for size in ((40, 2, 2, 16), (9, 1, 1, 5)):
        check_both(backend, size, dtype, dtype)
        check_both(backend, size, dtype, None)


@on()
def test_nan_reaches_its_element_and_sum_alone(backend: Backend) -> None:
    dq, dk, dv = parts_of((9, 2, 2, 8), FP32)
    dq[3, 2, 1] = dv[8, 1, 7] = float("nan")
    dqkv, dbias = backend.join_heads(dq, dk, dv, FP32)
    wanted = packed_of(dq, dk, dv)
    assert same_bits(dqkv, wanted)
    assert torch.equal(dbias.isnan(), wanted.flatten(1).isnan().any(0))


@on()
def test_empty_tensors(backend: Backend) -> None:
    for size in ((0, 2, 1, 8), (3, 2, 2, 0)):
        dqkv, dbias = backend.join_heads(*parts_of(size, FP32), FP32)
        assert dqkv.shape == (size[0], size[1], size[2] + 2, size[3])
        assert (dbias == 0).all()
