"""The gradients of a linear layer's parameters by products of bf16, against the products in float64."""

import pytest
import torch
from torch import Tensor

from gptlite.cpu import cpu_flags
from kernels.backends import Backend
from kernels.cases import BEST, BF16, CPUS, FP16, FP32, LOWER, each, normal
from kernels.library import Threads, halves, reversed_grains, uneven
from kernels.test_threads import assert_same
from kernels.tolerances import ARITHMETIC, check

PRODUCTS = "avx512_bf16" in cpu_flags()
WITH_PRODUCTS = (BEST, *(level for level in LOWER if level == "avx512_bf16"))  # by AMX, and by AVX512-BF16
WITHOUT = tuple(level for level in CPUS if level not in WITH_PRODUCTS or not PRODUCTS)
# [rows, outputs, inputs]: around tiles of 16 and 32, panels of 256 rows, blocks of 384 columns.
SIZES = [
    *((n, 40, 24) for n in (0, 1, 2, 31, 32, 33, 255, 256, 257, 600)),
    *((50, n, 24) for n in (0, 1, 15, 16, 17, 31, 32, 33, 383, 384, 385, 1153)),
    *((50, 24, n) for n in (0, 1, 15, 16, 17, 31, 32, 33, 383, 384, 385, 1153)),
    (300, 800, 800),
]


def inputs(size: tuple[int, int, int], dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    rows, outputs, width = size
    return normal((rows, outputs), dtype, "dy"), normal((rows, width), dtype, "x")


@pytest.mark.skipif(not PRODUCTS, reason="no AVX512-BF16 here")
class TestWithProducts:
    @each("size", SIZES, backends=WITH_PRODUCTS)
    def test_sizes(self, backend: Backend, size) -> None:
        dy, x = inputs(size)
        dw, dbias = backend.weight_gradient(dy, x, BF16)
        terms, sums = dy.double().abs().T @ x.double().abs(), dy.double().abs().sum(0)
        check("dw", dw, dy.double().T @ x.double(), terms, ARITHMETIC["weight_gradient"])
        check("dbias", dbias, dy.double().sum(0), sums, ARITHMETIC["weight_gradient"])

    @each("size", [(0, 3, 5), (70, 33, 35), (600, 385, 100)], backends=WITH_PRODUCTS)
    def test_fp32_has_the_values_of_bf16(self, backend: Backend, size) -> None:
        dy, x = inputs(size)
        rounded = [each.float() for each in backend.weight_gradient(dy, x, BF16)]
        assert_same(rounded, backend.weight_gradient(dy, x, FP32))

    @each("threads", (1, 2, 3, 8), backends=WITH_PRODUCTS)
    def test_threads_change_no_bit(self, backend: Backend, threads) -> None:
        dy, x = inputs((300, 800, 500))
        expected = backend.weight_gradient(dy, x)
        for split in (halves, reversed_grains, uneven):
            others = backend.having(threads=Threads(split, at_once=True)).weight_gradient(dy, x, threads=threads)
            assert_same(others, expected)

    @each("offsets", [(1,), (3, 0, 2)], backends=WITH_PRODUCTS)
    def test_any_alignment_gives_the_same_bits(self, backend: Backend, offsets) -> None:
        dy, x = inputs((100, 70, 50))
        others = backend.having(offsets=offsets).weight_gradient(dy, x)
        assert_same(others, backend.weight_gradient(dy, x))

    @each("value", [float("nan"), float("inf")], backends=WITH_PRODUCTS)
    def test_what_is_not_finite_stays_in_its_row_and_column(self, backend: Backend, value) -> None:
        dy, x = inputs((70, 40, 40))
        dy[69, 39], x[3, 5] = value, value
        dw, dbias = backend.weight_gradient(dy, x)
        bad = torch.zeros(40, 40, dtype=torch.bool)
        bad[39], bad[:, 5] = True, True
        assert torch.equal(~dw.isfinite(), bad)
        assert (~dbias.isfinite()).nonzero().tolist() == [[39]]


@each("dtype", (FP32, FP16), backends=(BEST,))
def test_other_dtypes_are_left_to_torch(backend: Backend, dtype) -> None:
    with pytest.raises(AssertionError, match="returned 10001"):
        backend.weight_gradient(*inputs((3, 4, 5), dtype))


@each("size", [(3, 4, 5)], [(3, 4, 5)], backends=WITHOUT)
def test_without_products_of_bf16_everything_is_left_to_torch(backend: Backend, size) -> None:
    with pytest.raises(AssertionError, match="returned 10001"):
        backend.weight_gradient(*inputs(size))
