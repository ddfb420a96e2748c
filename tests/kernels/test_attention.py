"""Causal attention of CPUs, forward and backward, against the formula in float64."""

import random

import torch
from torch import Tensor

from kernels.backends import NO_WINDOW, Backend
from kernels.cases import BF16, CPUS, DTYPES, FP32, each, normal, on, same_bits
from kernels.loop import loop_over
from kernels.test_threads import assert_same
from kernels.tolerances import ARGUMENT, ARITHMETIC, ATTENTION, check

LAYOUTS = ("bshd", "bhsd", "packed")
INF = float("inf")


def hidden(queries: int, keys: int, window: int = NO_WINDOW) -> Tensor:
    places = torch.arange(keys) - torch.arange(keys - queries, keys).unsqueeze(1)  # of keys, from that of the query
    return (places > 0) | (places <= -window)


class Reference:
    """Everything in float64; `terms_*` are the sums of the same products without their signs."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype, window: int = NO_WINDOW
    ) -> None:
        self.q, self.k, self.v, self.scale, self.dtype = q.double(), k.double(), v.double(), scale, dtype
        self.scores = (scale * self.q @ self.k.mT).masked_fill(hidden(q.shape[2], k.shape[2], window), -INF)
        self.p = torch.softmax(self.scores, -1)
        self.lse = torch.logsumexp(self.scores, -1)
        # The roundings of a score are exp's relative error; the backward takes exp of a difference of two more.
        size = (abs(scale) * self.q.abs() @ self.k.abs().mT).masked_fill(self.scores == -INF, 0.0)
        self.score_size = size.amax(-1, keepdim=True) if k.shape[2] else size
        self.p_error = ARITHMETIC["attention"] + 2 * ARGUMENT * self.score_size + ATTENTION[dtype]

    def check_forward(self, out: Tensor, lse: Tensor) -> None:
        check("out", out, self.p @ self.v, (self.p * self.p_error) @ self.v.abs(), 1.0)
        # The relative error of the sum, even of a single exponential, is an absolute one of its logarithm.
        check("lse", lse, self.lse, 1.0 + self.lse.abs() + self.score_size[..., 0], ARITHMETIC["attention"])

    def check_backward(self, gradients: tuple[Tensor, Tensor, Tensor], dout: Tensor, out: Tensor) -> None:
        """From `out` as the forward gave it."""
        dout, out = dout.double(), out.double()
        dot = (dout * out).sum(-1, keepdim=True)
        dp = dout @ self.v.mT
        ds = self.scale * self.p * (dp - dot)
        # p's error is relative; dp's and dot's are of their products; ds is rounded as p is.
        dp_size, dot_size = dout.abs() @ self.v.abs().mT, (dout * out).abs().sum(-1, keepdim=True)
        relative = ARITHMETIC["attention"] + 2 * ARGUMENT * self.score_size
        ds_error = abs(self.scale) * self.p * (dp_size + dot_size) * relative + ds.abs() * ATTENTION[self.dtype]
        dq, dk, dv = gradients
        check("dv", dv, self.p.mT @ dout, (self.p * self.p_error).mT @ dout.abs(), 1.0)
        sums = ARITHMETIC["attention"] * ds.abs()
        check("dq", dq, ds @ self.k, (ds_error + sums) @ self.k.abs(), 1.0)
        check("dk", dk, ds.mT @ self.q, (ds_error + sums).mT @ self.q.abs(), 1.0)


def inputs(size: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout of [batch, heads, queries, keys, width]."""
    batch, heads, queries, keys, width = size
    q, dout = (normal((batch, heads, queries, width), dtype, name) for name in ("q", "dout"))
    k, v = (normal((batch, heads, keys, width), dtype, name) for name in ("k", "v"))
    return q, k, v, dout


def check_both(backend: Backend, q, k, v, dout, scale: float, window: int = NO_WINDOW) -> None:
    reference = Reference(q, k, v, scale, q.dtype, window)
    out, lse = backend.attention_forward(q, k, v, scale, window=window)
    reference.check_forward(out, lse)
    # The backward on its own: from the right lse, rounded.
    gradients = backend.attention_backward(dout, out, reference.lse.float(), q, k, v, scale, window=window)
    reference.check_backward(gradients, dout, out)


# [batch, heads, queries, keys, width].
SIZES = [
    *((1, 2, n, n, 64) for n in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 257)),
    *((1, 1, 40, 40, width) for width in (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 80, 96, 100, 128, 129, 256)),
    *((1, 1, queries, keys, 32) for queries, keys in ((1, 300), (5, 37), (33, 64), (64, 65), (100, 513), (128, 400))),
    (3, 4, 20, 20, 16),
    (1, 1, 600, 600, 32),
    (1, 1, 1025, 1025, 8),
]
CORE_SIZES = [(2, 3, 5, 5, 7), (1, 2, 33, 33, 64), (1, 1, 100, 100, 32), (1, 1, 17, 80, 40), (1, 1, 1, 1, 1)]


@each(
    "size,dtype",
    [(s, d) for s in SIZES for d in DTYPES],
    [(s, d) for s in CORE_SIZES for d in DTYPES],
    backends=CPUS,
)
def test_sizes(backend: Backend, size, dtype) -> None:
    check_both(backend, *inputs(size, dtype), size[4] ** -0.5)


# Windows around the blocks of queries (64) and of keys (128 and 64), and the vectors and products within them.
WINDOWS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 190, 257, 400]
WINDOW_SIZES = [(1, 1, 257, 257, 32), (1, 2, 40, 40, 16), (1, 1, 100, 513, 24), (1, 1, 3, 300, 8), (1, 1, 70, 135, 40)]


@each("dtype", DTYPES, DTYPES, backends=CPUS)
@loop_over("size", WINDOW_SIZES)
@loop_over("window", WINDOWS)
def test_windows(backend: Backend, dtype, size, window) -> None:
    check_both(backend, *inputs(size, dtype), size[4] ** -0.5, window)


@on(CPUS)
def test_windows_of_random_sizes(backend: Backend) -> None:
    draw = random.Random(0)
    for _ in range(40):
        keys, width, dtype = draw.randint(1, 700), draw.randint(1, 70), draw.choice(DTYPES)
        size = (1, 1, draw.randint(1, keys), keys, width)
        check_both(backend, *inputs(size, dtype), draw.choice([0.2, 1.5]), draw.randint(1, keys + 3))


@each("dtype", DTYPES, (FP32, BF16), backends=CPUS)
def test_a_window_of_all_keys_gives_the_bits_of_none(backend: Backend, dtype) -> None:
    q, k, v, dout = inputs((1, 2, 150, 200, 32), dtype)
    out, lse = backend.attention_forward(q, k, v, 0.3)
    assert_same(backend.attention_forward(q, k, v, 0.3, window=200), (out, lse))
    gradients = backend.attention_backward(dout, out, lse, q, k, v, 0.3)
    assert_same(backend.attention_backward(dout, out, lse, q, k, v, 0.3, window=200), gradients)


@each("dtype", DTYPES, (FP32, BF16), backends=CPUS)
@loop_over("value", [float("nan"), INF])
def test_what_is_not_finite_ends_with_the_window(backend: Backend, dtype, value) -> None:
    """And keys in no window have gradients of 0."""
    q, k, v, dout = inputs((1, 1, 300, 900, 16), dtype)
    k[:, :, 700, 3] = v[:, :, 700, 5] = value
    out, lse = backend.attention_forward(q, k, v, 0.3, window=50)
    sees = (torch.arange(600, 900) >= 700) & (torch.arange(600, 900) < 750)
    assert torch.equal(out[0, 0].isfinite().all(-1), ~sees)
    gradients = backend.attention_backward(dout, out, lse, q, k, v, 0.3, window=50)
    assert gradients[0][0, 0][~sees].isfinite().all()
    v[:, :, 700], k[:, :, 700] = 1, 1
    out, lse = backend.attention_forward(q, k, v, 0.3, window=50)
    for gradient in backend.attention_backward(dout, out, lse, q, k, v, 0.3, window=50)[1:]:
        assert (gradient[0, 0, :551] == 0).all()
        assert (gradient[0, 0, 551:] != 0).any(-1).all()


@each("dtype", DTYPES, (FP32, BF16), backends=CPUS)
@loop_over("layout", LAYOUTS)
@loop_over("offsets", [(0,), (1,), (3, 0, 2)])
def test_any_layout_and_alignment_gives_the_same_bits(backend: Backend, dtype, layout, offsets) -> None:
    for size in ((2, 3, 35, 35, 24), (1, 2, 40, 40, 64)):
        q, k, v, dout = inputs(size, dtype)
        out, lse = backend.attention_forward(q, k, v, 0.3, "bhsd")
        gradients = backend.attention_backward(dout, out, lse, q, k, v, 0.3, "bhsd")
        other = backend.having(offsets=offsets)
        assert_same(other.attention_forward(q, k, v, 0.3, layout), (out, lse))
        assert_same(other.attention_backward(dout, out, lse, q, k, v, 0.3, layout), gradients)


@each("dtype", DTYPES, DTYPES, backends=CPUS)
@loop_over("scale", [1.0, 8.0, -0.5])
def test_scores_of_all_sizes(backend: Backend, dtype, scale) -> None:
    """Up to hundreds: probabilities of one key alone, and of nothing at all."""
    q, k, v, dout = inputs((1, 2, 70, 90, 32), dtype)
    check_both(backend, q, k, v, dout, scale)


@each("dtype", DTYPES, DTYPES, backends=CPUS)
def test_a_maximum_that_comes_late(backend: Backend, dtype) -> None:
    """Scores that grow along the keys: what was summed must be rescaled at every block."""
    q, k, v, dout = inputs((1, 1, 300, 300, 16), dtype)
    q, k = q.abs(), k.abs() * torch.linspace(0.01, 2, 300).to(dtype).unsqueeze(-1)
    check_both(backend, q, k, v, dout, 1.0)
    check_both(backend, q, k.flip(2), v, dout, 1.0)


@each("dtype", DTYPES, (FP32, BF16), backends=CPUS)
def test_later_keys_are_of_no_matter(backend: Backend, dtype) -> None:
    q, k, v, _ = inputs((1, 1, 70, 100, 24), dtype)
    out, lse = backend.attention_forward(q, k, v, 0.3)
    for last in (99, 90, 64):  # query i sees key i + 30
        k2, v2 = k.clone(), v.clone()
        k2[:, :, last:], v2[:, :, last:] = 30, -30
        changed, changed_lse = backend.attention_forward(q, k2, v2, 0.3)
        assert same_bits(changed[:, :, : last - 30], out[:, :, : last - 30])
        assert same_bits(changed_lse[:, :, : last - 30], lse[:, :, : last - 30])
        assert not torch.equal(changed[:, :, last - 30], out[:, :, last - 30])


@each("dtype", DTYPES, (FP32, BF16), backends=CPUS)
@loop_over("value", [float("nan"), INF])
def test_what_is_not_finite_reaches_those_that_see_it(backend: Backend, dtype, value) -> None:
    for place in range(3):
        tensors = list(inputs((1, 1, 40, 40, 16), dtype))
        tensors[place][0, 0, 20, 3] = value
        q, k, v, dout = tensors
        out, lse = backend.attention_forward(q, k, v, 0.3)
        sees = torch.arange(40) == 20 if place == 0 else torch.arange(40) >= 20
        assert torch.equal(out[0, 0].isfinite().all(-1), ~sees) or (value == INF and place < 2)  # -inf: 0
        assert out[0, 0][~sees].isfinite().all()
        assert lse[0, 0][~sees].isfinite().all()
        gradients = backend.attention_backward(dout, out, lse, q, k, v, 0.3)
        assert gradients[0][0, 0][~sees].isfinite().all()
        assert value == INF or not gradients[0][0, 0, 20].isfinite().all()
        if place == 0:  # keys past the query have nothing of it
            assert all(each_[0, 0, 21:].isfinite().all() for each_ in gradients[1:])


@on(CPUS)
def test_empty_tensors(backend: Backend) -> None:
    for size in [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (1, 1, 0, 0, 5), (1, 2, 0, 4, 5)]:
        q, k, v, dout = inputs(size, FP32)
        out, lse = backend.attention_forward(q, k, v, 1.0)
        assert out.shape == q.shape
        gradients = backend.attention_backward(dout, out, lse, q, k, v, 1.0)
        assert (gradients[1] == 0).all()  # keys that none asks for
        assert (gradients[2] == 0).all()
