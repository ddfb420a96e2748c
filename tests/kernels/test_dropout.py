"""Dropout, bit for bit gptlite/ops/dropout.py's mask."""

import torch

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP16, FP32, WIDE, WIDTHS, each, normal, of_dtypes, on, same_bits
from kernels.loop import loop_over
from kernels.options import Dropout

# Below and above 2^32, where their upper half shares a word with the head.
IDS = (0, 1, 2**31 + 3, 2**32, 2**32 + 1, 5 * 2**32 + 9, 2**47 - 1)


def expected(x: torch.Tensor, dropout: Dropout) -> torch.Tensor:
    """Kept elements times the scale in fp32, rounded once."""
    scaled = x.float() * torch.tensor(dropout.scale, dtype=torch.float32)
    return torch.where(dropout.keep(x.shape), scaled, 0.0).to(x.dtype)


# [batch, heads, positions, width].
SIZES = [*((1, 1, 3, width) for width in WIDTHS), *((1, 1, 2, width) for width in WIDE), (7, 3, 5, 33), (2, 1, 700, 4)]
CORE_SIZES = [(1, 1, 1, 1), (2, 3, 2, 33), (1, 1, 2, 777), (7, 2, 1, 6), (1, 1, 1, 8193)]


@each("size,dtype", [(s, d) for s in SIZES for d in DTYPES], [(s, d) for s in CORE_SIZES for d in DTYPES])
def test_sizes(backend: Backend, size, dtype) -> None:
    x, dropout = normal(size, dtype, "x"), Dropout(0.4, IDS[: size[0]])
    assert same_bits(backend.dropout(x, dropout), expected(x, dropout))


NAMES = [
    {"seed": 0, "site": 0},
    {"seed": 2**32 - 1, "site": 2**31 + 1},
    {"site": 2**32 - 1},
    {"first_position": 1, "first_head": 1},
    {"first_position": 2**31 - 2, "first_head": 2**16 - 1},
    {"first_position": 2**32 - 5},
]


@each("name", NAMES, NAMES[1:])
@loop_over("ids", [IDS[:1], IDS[3:6], IDS[6:]])
def test_names(backend: Backend, name, ids) -> None:
    x, dropout = normal((len(ids), 3, 4, 37), FP32, "x"), Dropout(0.5, ids, **name)
    assert same_bits(backend.dropout(x, dropout), expected(x, dropout))


@each("p", (0.0, 1e-9, 0.1, 0.5, 0.9, 1 - 2**-30), (0.0, 0.1))
def test_chances(backend: Backend, p) -> None:
    x, dropout = normal((2, 2, 20, 100), FP32, "x"), Dropout(p, IDS[1:3])
    y = backend.dropout(x, dropout)
    assert same_bits(y, expected(x, dropout))
    assert abs((y == 0).double().mean() - p) < 0.02


@on()
def test_the_threshold_itself_is_kept(backend: Backend) -> None:
    """p such that floor(p 2^32) is a word that is drawn: that one is kept, and dropped with one more."""
    x = torch.ones(1, 1, 1, 64)
    low, high = 0, 2**32 - 1  # the largest threshold at which element 7 is kept: its word
    while low < high:
        middle = (low + high + 1) // 2
        kept = bool(Dropout(middle / 2**32, (3,)).keep(x.shape)[0, 0, 0, 7])
        low, high = (middle, high) if kept else (low, middle - 1)
    assert backend.dropout(x, Dropout(low / 2**32, (3,)))[0, 0, 0, 7] != 0
    assert backend.dropout(x, Dropout((low + 1) / 2**32, (3,)))[0, 0, 0, 7] == 0


@on()
@of_dtypes()
def test_what_is_dropped_may_be_anything(backend: Backend, dtype) -> None:
    size, dropout = (2, 1, 3, 50), Dropout(0.3, IDS[3:5])
    keep = dropout.keep(size)
    for value in (float("nan"), float("inf"), -1.0):
        x = torch.full(size, value, dtype=dtype)
        y = backend.dropout(x, dropout)
        assert same_bits(y[~keep], torch.zeros_like(y[~keep]))
        assert torch.equal(y.isnan(), x.isnan() & keep)


@on()
@of_dtypes((BF16, FP16))
def test_halves_are_rounded_to_even(backend: Backend, dtype) -> None:
    """Times 1.5, every other number is half way between two."""
    x = (1 + torch.arange(256) * torch.finfo(dtype).eps).to(dtype).view(1, 1, 2, 128)
    dropout = Dropout(1 / 3, (1,))
    assert torch.tensor(dropout.scale, dtype=torch.float32) == 1.5
    assert same_bits(backend.dropout(x, dropout), expected(x, dropout))


@on()
def test_values_that_round_and_overflow(backend: Backend) -> None:
    x = torch.tensor([65504.0, -65504.0, 6e4, 5.96e-8, 1.0 + 2**-10, 3.0]).to(FP16).repeat(9).view(1, 1, 1, 54)
    assert same_bits(backend.dropout(x, Dropout(0.3, (1,))), expected(x, Dropout(0.3, (1,))))


@on()
def test_empty_tensors(backend: Backend) -> None:
    for size in [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)]:
        assert backend.dropout(torch.empty(size), Dropout(0.3, IDS[: size[0]])).shape == size
