"""Rows of an embedding's gradient, added by token to another gradient, against float64."""

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP32, each, generator, normal, on, same_bits
from kernels.tolerances import ARITHMETIC, check

TOLERANCE = ARITHMETIC["token_rows"]
VOCABULARY = 50


def tokens_of(rows: int, kind: str) -> Tensor:
    """`many`: most occur; `few`: one has most places, as a comma has in text; `one`: all the same."""
    tokens = torch.randint(VOCABULARY, (rows,), generator=generator(rows, kind))
    if kind == "many":
        return tokens
    return torch.where(tokens < 40, 7, tokens) if kind == "few" else torch.full_like(tokens, VOCABULARY - 1)


def check_sum(backend: Backend, dtype: torch.dtype, rows: int, width: int, kind: str) -> None:
    table, dy, tokens = (
        normal((VOCABULARY, width), FP32, "t"),
        normal((rows, width), dtype, "dy"),
        tokens_of(rows, kind),
    )
    found = backend.add_token_rows(table, dy, tokens)
    expected = table.double().index_add(0, tokens, dy.double())
    check("table", found, expected, table.abs().double().index_add(0, tokens, dy.abs().double()), TOLERANCE)
    absent = torch.ones(VOCABULARY, dtype=torch.bool)
    absent[tokens] = False
    assert same_bits(found[absent], table[absent])


SIZES = [(rows, width) for rows in (1, 2, 5, 33, 300) for width in (1, 8, 33, 64, 100, 256, 264, 777)]
KINDS = ("many", "few", "one")


@each(
    "rows,width,dtype,kind",
    [(*size, DTYPES[i % 3], kind) for i, size in enumerate(SIZES) for kind in KINDS],
    [(300, 8, BF16, "few"), (33, 264, FP32, "many"), (70, 33, BF16, "one"), (5, 777, FP32, "few"), (1, 1, FP32, "one")],
)
def test_sizes(backend: Backend, rows: int, width: int, dtype: torch.dtype, kind: str) -> None:
    check_sum(backend, dtype, rows, width, kind)


@on()
def test_nan_reaches_its_token_alone(backend: Backend) -> None:
    dy, tokens = normal((20, 16), FP32, "dy"), tokens_of(20, "many")
    dy[4, 3] = float("nan")
    found = backend.add_token_rows(torch.zeros(VOCABULARY, 16), dy, tokens)
    wanted = torch.zeros(VOCABULARY, 16, dtype=torch.bool)
    wanted[tokens[4], 3] = True
    assert torch.equal(found.isnan(), wanted)


@on()
def test_empty_tensors(backend: Backend) -> None:
    for rows, width in ((0, 8), (3, 0)):
        table = torch.ones(VOCABULARY, width)
        assert same_bits(backend.add_token_rows(table, torch.ones(rows, width), tokens_of(rows, "one")), table)
