"""RMS norm and rotation of packed heads against the formulas in float64, and their gradients against autograd's."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.backends import Backend, Pair
from kernels.cases import BF16, DTYPES, FP16, FP32, each, normal, of_dtypes, on, rows_of, same_bits
from kernels.loop import loop_over
from kernels.tolerances import ARITHMETIC, check

TOLERANCE, EPS = ARITHMETIC["rope"], 1e-5
NONE: Pair = (None, None)
WHAT = ("both", "rotation", "norm")  # what heads go through; norms have gains
Size = tuple[int, int, int, int]  # tokens, groups, queries of a group, width


@dataclass
class Given:
    """Arguments of the op."""

    qkv: Tensor
    angles: Pair
    gains: Pair
    eps: float | None

    def parts(self, packed: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """The queries and the keys in a tensor, with their gains."""
        return [(packed[..., :-2, :], self.gains[0]), (packed[..., -2:-1, :], self.gains[1])]

    def rotated(self, x: Tensor, sign: int = 1, sizes: bool = False) -> Tensor:
        """x turned; `sizes`: the terms of each sum without their signs."""
        cos, sin = self.angles
        if cos is None or sin is None:
            return x.abs() if sizes else x
        cos, sin = (each.double().repeat(len(x) // max(len(each), 1), 1)[:, None, None] for each in (cos, sign * sin))
        first, second = x.chunk(2, -1)
        if sizes:
            cos, sin, first, second = cos.abs(), sin.abs(), first.abs(), second.abs()
            return torch.cat([first * cos + second * sin, second * cos + first * sin], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def rstd(self, x: Tensor) -> Tensor:
        return 1 / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def normed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        if self.eps is None:
            return x
        return x * self.rstd(x) * (1 if gain is None else gain.double())


def given_of(size: Size, dtype: torch.dtype, what: str, sequences: int = 1) -> Given:
    """`sequences` have the same angles."""
    tokens, groups, queries, width = size
    turns = torch.linspace(-3, 5, tokens // sequences)[:, None] * torch.linspace(1, 0.1, width // 2)
    angles = NONE if what == "norm" else (turns.cos(), turns.sin())
    gains = NONE if what == "rotation" else (normal([width], dtype, "q") + 1, normal([width], dtype, "k"))
    qkv = normal((tokens, groups, queries + 2, width), dtype, "qkv")
    return Given(qkv, angles, gains, None if what == "rotation" else EPS)


def check_both(backend: Backend, given: Given) -> None:
    out = backend.rope_forward(given.qkv, given.angles, given.gains, given.eps)
    dout = normal(out.shape, out.dtype, "dout")
    saved = None if given.eps is None else given.qkv
    dqkv, *dgains = backend.rope_backward(dout, saved, given.angles, given.gains, given.eps)
    parts = zip(given.parts(out), given.parts(dqkv), given.parts(dout), given.parts(given.qkv), dgains, strict=True)
    for (y, _), (dx, _), (dy, _), (x, gain), dgain in parts:
        check_part(given, x.double(), gain, y, dy.double(), dx, dgain)
    assert same_bits(out[..., -1, :], given.qkv[..., -1, :])
    assert same_bits(dqkv[..., -1, :], dout[..., -1, :])


def check_part(
    given: Given, x: Tensor, gain: Tensor | None, y: Tensor, dy: Tensor, dx: Tensor, dgain: Tensor | None
) -> None:
    normed = given.normed(x, gain)
    check("y", y, given.rotated(normed).detach(), given.rotated(normed, sizes=True), TOLERANCE)
    leaves = [each.double().clone().requires_grad_() for each in (x, gain) if each is not None]
    expected = torch.autograd.grad(given.rotated(given.normed(*leaves, *[None] * (2 - len(leaves)))), leaves, dy)
    terms = given.rotated(dy, -1, sizes=True)
    assert (dgain is None) == (gain is None)
    if given.eps is not None:
        unit = (x * given.rstd(x)).abs()
        if gain is not None and dgain is not None:
            check("dgain", dgain, expected[1], (terms * unit).flatten(0, -2).sum(0), TOLERANCE)
            terms = terms * gain.double().abs()
        terms = given.rstd(x) * (terms + unit * (terms * unit).mean(-1, keepdim=True))
    check("dx", dx, expected[0], terms, TOLERANCE)


EVEN = (2, 4, 6, 16, 30, 32, 34, 48, 62, 64, 66, 80, 96, 126, 128, 130, 192, 256, 320, 510, 512)
SIZES: list[Size] = [(3, 2, 3, width) for width in EVEN]
SIZES += [(1, 1, 1, 64), (70, 2, 2, 64), (600, 1, 1, 4), (300, 1, 4, 16)]
CORE: list[Size] = [(3, 2, 3, 64), (5, 1, 1, 66), (2, 1, 2, 80), (70, 1, 1, 16), (1, 1, 2, 512), (2, 1, 1, 2)]


@each(
    "size,dtype,what",
    [(size, dtype, what) for size in SIZES for dtype in DTYPES for what in WHAT],
    [(size, DTYPES[(i + j) % 3], what) for i, size in enumerate(CORE) for j, what in enumerate(WHAT)],
)
def test_sizes(backend: Backend, size: Size, dtype: torch.dtype, what: str) -> None:
    check_both(backend, given_of(size, dtype, what, 2 if size[0] % 2 == 0 else 1))


@each("width,dtype", [(w, d) for w in (1, 3, 33, 65, 127, 511) for d in DTYPES], [(1, FP32), (33, BF16), (511, FP16)])
def test_norms_of_any_width(backend: Backend, width: int, dtype: torch.dtype) -> None:
    check_both(backend, given_of((4, 1, 2, width), dtype, "norm"))


@on()
@of_dtypes((BF16, FP16))
def test_gains_of_fp32_and_a_single_gain(backend: Backend, dtype: torch.dtype) -> None:
    for width in (64, 66):
        given = given_of((5, 1, 2, width), dtype, "both")
        given.gains = normal([width], FP32, "q"), normal([width], FP32, "k")
        check_both(backend, given)
        for gains in ((given.gains[0], None), (None, given.gains[1]), NONE):
            given.gains = gains
            check_both(backend, given)


@on()
@of_dtypes()
@loop_over("kind", ["large", "tiny", "outlier", "zeros"])
def test_values_of_all_kinds(backend: Backend, kind: str, dtype: torch.dtype) -> None:
    for width in (64, 66):
        given = given_of((4, 1, 2, width), dtype, "both")
        given.qkv = rows_of(kind, 16, width, dtype).view(given.qkv.shape)
        check_both(backend, given)


@on()
@of_dtypes((FP32, BF16))
def test_heads_do_not_touch_each_other(backend: Backend, dtype: torch.dtype) -> None:
    """Whatever is in a head: NaN in a query is in that query and in the queries' gain alone."""
    for width in (64, 66):
        given = given_of((3, 2, 2, width), dtype, "both")
        given.qkv[1, 1, 0, 5] = float("nan")
        given.qkv[2, 0, 3, 7], given.qkv[2, 1, 3] = float("inf"), float("nan")  # in values
        hit = torch.zeros(given.qkv.shape, dtype=torch.bool)
        hit[1, 1, 0] = True
        wanted = hit | given.qkv.isnan()
        out = backend.rope_forward(given.qkv, given.angles, given.gains, given.eps)
        assert torch.equal(out.isnan(), wanted)
        assert same_bits(out[:, :, 3], given.qkv[:, :, 3])
        dout = torch.ones_like(given.qkv)
        dqkv, dq_gain, dk_gain = backend.rope_backward(dout, given.qkv, given.angles, given.gains, given.eps)
        assert torch.equal(dqkv.isnan(), hit)
        assert dq_gain.isnan().all()
        assert dk_gain.isfinite().all()


@on()
def test_empty_tensors(backend: Backend) -> None:
    for size in ((0, 2, 1, 8), (3, 0, 1, 8)):
        given = given_of(size, FP32, "both")
        assert backend.rope_forward(given.qkv, given.angles, given.gains, EPS).shape == given.qkv.shape
        _, *dgains = backend.rope_backward(given.qkv, given.qkv, given.angles, given.gains, EPS)
        assert all((dgain == 0).all() for dgain in dgains)


@on(("emulated",))
def test_wider_heads_are_refused(backend: Backend) -> None:
    given = given_of((2, 1, 1, 514), FP32, "both")
    with pytest.raises(AssertionError, match="rope_forward returned"):
        backend.rope_forward(given.qkv, given.angles, given.gains, EPS)
