"""Masked and causal softmax against the formula in float64."""

import ctypes
import mmap
import os

import torch
from torch import Tensor

from kernels import backends
from kernels.backends import Backend
from kernels.cases import (
    BEST,
    BF16,
    DTYPES,
    FP16,
    FP32,
    KINDS,
    MASKS,
    WIDE,
    WIDTHS,
    each,
    normal,
    on,
    rows_of,
    same_bits,
)
from kernels.loop import loop_over
from kernels.tolerances import ARGUMENT, ARITHMETIC, check

INF, NAN = float("inf"), float("nan")


def softmax(z: Tensor) -> Tensor:
    """In float64, with rows of -inf alone as zeros."""
    return torch.where((z == -INF).all(-1, keepdim=True), 0.0, torch.softmax(z, -1))


def masked(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """scale * x + mask."""
    z = x.double() * scale
    if mask is None:
        return z
    return z.masked_fill(mask, -INF) if mask.dtype == torch.bool else z + mask.double()


def check_forward(y: Tensor, z: Tensor) -> None:
    expected = softmax(z)
    largest = torch.where(z.isfinite(), z.abs(), 0.0).amax(-1, keepdim=True) if z.numel() else 0.0
    check("y", y, expected, expected.nan_to_num(), ARITHMETIC["softmax"] + ARGUMENT * largest)


def check_backward(dx: Tensor, dy: Tensor, y: Tensor, scale: float) -> None:
    dy, y = dy.double(), y.double()
    expected = scale * y * (dy - (dy * y).sum(-1, keepdim=True))
    terms = abs(scale) * y * (dy.abs() + (dy * y).abs().sum(-1, keepdim=True))
    check("dx", dx, expected, terms, ARITHMETIC["softmax_backward"])


# The sizes: [batch, heads, queries, keys].
SIZES = [*((1, 2, 3, keys) for keys in WIDTHS), *((1, 1, 2, keys) for keys in WIDE), (3, 2, 37, 41), (2, 1, 500, 64)]
CORE_SIZES = [(2, 3, 5, 33), (1, 1, 2, 777), (1, 2, 1, 1), (1, 1, 1, 8193)]


@each("size,dtype", [(s, d) for s in SIZES for d in DTYPES], [(s, d) for s in CORE_SIZES for d in DTYPES])
def test_without_a_mask(backend: Backend, size, dtype) -> None:
    x, dy = normal(size, dtype, "x"), normal(size, dtype, "dy")
    y = backend.masked_softmax_forward(x, None, 1.7)
    check_forward(y, masked(x, None, 1.7))
    y, dy = y.flatten(0, 2), dy.flatten(0, 2)
    check_backward(backend.masked_softmax_backward(dy, y, 1.7), dy, y, 1.7)


# Which dims of a mask [batch, heads, queries, keys] are whole; the others broadcast.
BROADCAST = [
    (True, True, True, True),
    (True, False, False, True),
    (False, False, True, True),
    (False, True, True, False),
]


@each(
    "whole,mask_dtype,dtype",
    [(w, m, d) for w in BROADCAST for m in MASKS for d in DTYPES],
    [(BROADCAST[i % 4], m, DTYPES[i % 3]) for i, m in enumerate((*MASKS, torch.bool))],
)
@loop_over("keys", [19, 260])
def test_a_mask_of_any_dtype_broadcasts(backend: Backend, whole, mask_dtype, dtype, keys) -> None:
    size = (3, 2, 7, keys)
    shape = [length if kept else 1 for length, kept in zip(size, whole, strict=True)]
    mask = normal(shape, FP32, "mask")
    mask = mask > 0.3 if mask_dtype == torch.bool else torch.where(mask > 1, -INF, mask * 3).to(mask_dtype)
    x = normal(size, dtype, "x")
    check_forward(backend.masked_softmax_forward(x, mask, 0.3), masked(x, mask, 0.3))


@each("mask_dtype", MASKS, (torch.bool, BF16))
def test_a_mask_may_have_any_strides(backend: Backend, mask_dtype) -> None:
    size = (3, 2, 5, 35)
    mask = normal((35, 5, 2, 3), FP32, "strides").permute(3, 2, 1, 0)
    mask = mask > 0.3 if mask_dtype == torch.bool else (mask * 3).to(mask_dtype)
    assert mask.stride()[3] == 30
    x = normal(size, FP32, "x")
    check_forward(backend.masked_softmax_forward(x, mask, 1.0), masked(x, mask, 1.0))


@on([BEST])
@loop_over("mask_dtype", [torch.bool, FP32])
def test_nothing_behind_a_mask_is_read(backend: Backend, monkeypatch, mask_dtype) -> None:
    """In a process that such a read ends, as the page behind the last element cannot be read."""
    x, rows = normal((1, 1, 5, 37), FP32, "x"), normal((37, 5), FP32, "strides")
    data = rows > 0.3 if mask_dtype == torch.bool else rows
    mask = data.t()[None, None]
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    place = start + mmap.PAGESIZE - data.nbytes
    ctypes.memmove(place, data.data_ptr(), data.nbytes)
    monkeypatch.setattr(backends, "_permuted", lambda *_: (place, mask))
    if (child := os.fork()) == 0:
        backend.masked_softmax_forward(x, mask, 1.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@each("dtype", DTYPES, DTYPES)
@loop_over("keys", [1, 16, 45, 1100])
def test_rows_with_nothing_left_are_zeros_with_zero_gradient(backend: Backend, dtype, keys) -> None:
    x = normal((1, 1, 4, keys), dtype, "x")
    left_out = torch.zeros(x.shape, dtype=torch.bool)
    left_out[..., 1, :] = True
    left_out[..., 2, : keys - 1] = True  # only the last key is left
    y = backend.masked_softmax_forward(x, left_out, 1.0)
    check_forward(y, masked(x, left_out, 1.0))
    assert (y[..., 1, :] == 0).all()
    assert y[0, 0, 2, keys - 1] == 1
    added = torch.zeros(x.shape, dtype=dtype).masked_fill(left_out, -INF)
    assert same_bits(backend.masked_softmax_forward(x, added, 1.0), y)
    assert same_bits(backend.masked_softmax_forward(x.masked_fill(left_out, -INF), None, 1.0), y)
    dx = backend.masked_softmax_backward(normal((4, keys), dtype, "dy"), y.flatten(0, 2), 1.0)
    assert (dx[1] == 0).all()


@on()
@loop_over("keys", [5, 70, 2100])
def test_what_is_left_out_by_a_bool_mask_is_of_no_matter(backend: Backend, keys) -> None:
    x, mask = normal((1, 1, 3, keys), FP32, "x"), torch.zeros(1, 1, 3, keys, dtype=torch.bool)
    mask[..., 0], mask[..., keys // 2], mask[..., 1, -1] = True, True, True
    expected = backend.masked_softmax_forward(x, mask, 1.0)
    for value in (NAN, INF, -INF, 3e38):
        assert same_bits(backend.masked_softmax_forward(x.masked_fill(mask, value), mask, 1.0), expected)


@on()
def test_a_bool_mask_is_any_byte_but_zero(backend: Backend) -> None:
    x, byte = normal((1, 1, 4, 70), FP32, "x"), torch.arange(280).view(1, 1, 4, 70) % 256
    mask = byte.to(torch.uint8).view(torch.bool)
    check_forward(backend.masked_softmax_forward(x, mask, 1.0), masked(x, byte != 0, 1.0))


@on()
@loop_over("keys", [1, 40, 1500])
def test_nan_and_infinity_reach_their_row_alone(backend: Backend, keys) -> None:
    x = normal((1, 1, 4, keys), FP32, "x")
    x[0, 0, 1, keys // 2], x[0, 0, 2, keys - 1] = NAN, INF
    y = backend.masked_softmax_forward(x, None, 1.0)[0, 0]
    assert y[1:3].isnan().all()
    check_forward(y[0::3], x[0, 0, 0::3].double())
    dy = normal((3, keys), FP32, "dy")
    dy[1, keys // 2] = NAN
    dx = backend.masked_softmax_backward(dy, y[0::3][[0, 1, 0]], 1.0)
    assert dx[1].isnan().all()
    assert dx[0::2].isfinite().all()


@each("kind,dtype", [(k, d) for k in KINDS for d in DTYPES], [("large", BF16), ("big_mean", FP32), ("outlier", FP16)])
@loop_over("keys", [31, 1024, 9000])
def test_values_of_all_kinds(backend: Backend, kind, dtype, keys) -> None:
    x = rows_of(kind, 4, keys, dtype).view(1, 2, 2, keys)
    for scale in (1.0, 0.125, -1.0):
        y = backend.masked_softmax_forward(x, None, scale)
        check_forward(y, masked(x, None, scale))
    y, dy = y.flatten(0, 2), rows_of(kind, 4, keys, dtype)
    check_backward(backend.masked_softmax_backward(dy, y, 0.125), dy, y, 0.125)


@on()
@loop_over("causal", [False, True])
def test_empty_tensors(backend: Backend, causal) -> None:
    for size in [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)]:
        x = torch.empty(size)
        if causal:
            x = x.flatten(0, 1)
            assert backend.causal_softmax_forward(x, 1.0).shape == x.shape
            assert backend.causal_softmax_backward(x, x, 1.0).shape == x.shape
        else:
            mask = torch.empty(size, dtype=torch.bool)
            assert backend.masked_softmax_forward(x, mask, 1.0).shape == x.shape
            rows = torch.empty(12 if size[3] == 0 else 0, size[3])
            assert backend.masked_softmax_backward(rows, rows, 1.0).shape == rows.shape


# [matrices, queries, keys], with more keys than queries, and fewer: then the first queries see none.
CAUSAL = [
    (2, 1, 1),
    (3, 7, 7),
    (2, 33, 33),
    (2, 5, 40),
    (1, 40, 5),
    (1, 3, 9000),
    (1, 200, 257),
    (5, 129, 129),
    (1, 9, 0),
]


def hidden(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)


@each("size,dtype", [(s, d) for s in CAUSAL for d in DTYPES], [(s, d) for s in CAUSAL[1:6] for d in (FP32, BF16)])
def test_causal(backend: Backend, size, dtype) -> None:
    x, dy, out = normal(size, dtype, "x"), normal(size, dtype, "dy"), hidden(*size[1:])
    y = backend.causal_softmax_forward(x.masked_fill(out, NAN), 0.9)  # what is hidden is not read
    check_forward(y, (x.double() * 0.9).masked_fill(out, -INF))
    assert (y.masked_select(out) == 0).all()
    dx = backend.causal_softmax_backward(dy, y, 0.9)
    check_backward(dx, dy, y, 0.9)
    assert (dx.masked_select(out) == 0).all()


@each("kind,dtype", [(k, d) for k in KINDS for d in DTYPES], [("large", BF16)])
def test_causal_values_of_all_kinds(backend: Backend, kind, dtype) -> None:
    x, out = rows_of(kind, 60, 70, dtype).view(2, 30, 70), hidden(30, 70)
    y = backend.causal_softmax_forward(x, 0.5)
    check_forward(y, (x.double() * 0.5).masked_fill(out, -INF))
    dy = rows_of(kind, 60, 70, dtype).view(2, 30, 70)
    check_backward(backend.causal_softmax_backward(dy, y, 0.5), dy, y, 0.5)


@on()
def test_causal_nan_reaches_the_rows_that_see_it(backend: Backend) -> None:
    x = normal((1, 6, 6), FP32, "x")
    x[0, :, 3] = NAN
    y = backend.causal_softmax_forward(x, 1.0)[0]
    sees = ~hidden(6, 6)
    sees[:3] = False
    assert torch.equal(y.isnan(), sees)
