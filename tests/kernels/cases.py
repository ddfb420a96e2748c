"""Which backends, dtypes, sizes and values the kernels are tested with."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from cpu_levels import cpu_level
from torch import Tensor

from gptlite.cpu import LEVELS
from kernels.loop import Test, columns, loop_count, loop_over

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)
MASKS = (torch.bool, *DTYPES)  # a mask's dtypes

BEST = "best"
LOWER = tuple(LEVELS)[: list(LEVELS).index(cpu_level())][::-1]  # instruction sets below this CPU's best, best first
CPUS = (BEST, *LOWER)
EMULATED = "emulated"
BACKENDS = (*CPUS, EMULATED)
PAIR = (BEST, EMULATED)  # for what is the same to every CPU

# Around vectors of 4, 8, 16 and 32, around blocks of threads, and the widths of models and vocabularies.
WIDTHS = (
    *sorted({2**n + near for n in range(1, 9) for near in (-1, 0, 1)} - {128, 256}),
    *(768, 777, 1024, 1025, 2049, 4096),
)
WIDE = (8192, 8193, 50257, 100_000)

FEW = 6  # cases that every backend takes in the slow tests
LOOP = 40  # cases that a slow or long test runs at most, so that a sample of the tests has some of every kind
LOOP_EMULATED = 5  # which take seconds each

# Values of rows; `rows_of` says what they are.
KINDS = ("normal", "large", "tiny", "constant", "big_mean", "outlier", "zeros")


def each(
    names: str, cases: Iterable[Any], core: Iterable[Any] = (), backends: Iterable[str] = BACKENDS
) -> Callable[[Test], Test]:
    """Loop over cases (see loop.py), on `backend`s: on the best one all cases, on the emulator those of `core`. Of the
    rest every third case of a backend, each backend's others, is for the slow tests: all of a few; the others are long,
    and those that take the emulator seconds. `core` may have cases of its own."""
    cases, core = list(cases), list(core)
    every = [*core, *(case for case in cases if case not in core)]

    def parametrized(test: Test) -> Test:
        params = []
        for number, backend in enumerate(backends):
            kinds: dict[str, list[Any]] = {"core": [], "rest": [], "slow": [], "long": []}
            for index, case in enumerate(every):
                kind = "core" if index < len(core) else "rest"
                if backend != BEST and (backend != EMULATED or kind != "core"):
                    # By thirds of their number, too: dtypes, which come in threes, take turns.
                    turn = len(cases) <= FEW or (index + index // 3 + number) % 3 == 0
                    wide = backend == EMULATED and _is_wide(case)
                    kind = "slow" if turn and not wide else "long"
                kinds[kind].append(case)
            most = max(1, (LOOP_EMULATED if backend == EMULATED else LOOP) // loop_count(test))
            for kind, of_kind in kinds.items():
                deselected = kind in ("slow", "long")
                marks = [getattr(pytest.mark, kind)] if deselected else []
                size = most if deselected else max(1, len(of_kind))
                for first in range(0, len(of_kind), size):
                    name = f"{backend}-{kind}" if len(of_kind) <= size else f"{backend}-{kind}-{first}"
                    some = columns(names, of_kind[first : first + size])
                    params.append(pytest.param(backend, *some, marks=marks, id=name))
        return pytest.mark.parametrize("backend," + names, params, indirect=["backend"])(test)

    return parametrized


def _is_wide(case: Any) -> bool:
    values = case if isinstance(case, tuple) else (case,)
    return any(isinstance(value, tuple) and max(value) >= 50257 for value in values)


def on(backends: Iterable[str] = BACKENDS) -> pytest.MarkDecorator:
    """Parametrizes `backend` alone; the CPU's lesser instruction sets are for the slow tests."""
    marks = {each: () if each in (BEST, EMULATED) else (pytest.mark.slow,) for each in backends}
    return pytest.mark.parametrize("backend", [pytest.param(each, marks=marks[each]) for each in marks], indirect=True)


def of_dtypes(dtypes: Iterable[torch.dtype] = DTYPES) -> pytest.MarkDecorator:
    """Loop over `dtype`."""
    return loop_over("dtype", dtypes)


def generator(*seed: object) -> torch.Generator:
    """The same values at every run, and others for other cases."""
    number = 0
    for part in seed:
        for byte in str(part).encode():
            number = (number * 257 + byte) % (2**31 - 1)
    return torch.Generator().manual_seed(number)


def normal(shape: Iterable[int], dtype: torch.dtype, *seed: object) -> Tensor:
    return torch.randn(*shape, generator=generator(*shape, *seed)).to(dtype)


def rows_of(kind: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width] of a kind of values."""
    x = torch.randn(rows, width, generator=generator(kind, rows, width))
    match kind:
        case "normal":
            pass
        case "large":
            x *= 1e3 if dtype == FP16 else 1e4
        case "tiny":
            x *= 1e-3 if dtype == FP16 else 1e-12
        case "constant":  # another in each row
            x = x[:, :1].expand(rows, width) * 10
        case "big_mean":
            x = x + 1000
        case "outlier":
            x[:, width // 2] = 1e4
        case "zeros":
            x.zero_()
        case _:
            raise ValueError(kind)
    return x.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
