"""The instruction sets of the CPU backends."""

import ctypes

import pytest
from cpu_levels import cpu_level

from gptlite.cpu import LEVELS, LIMITS
from kernels.backends import Backend, limit_isa
from kernels.cases import BEST, LOWER, on

ISA = {"baseline": "baseline", "avx2": "avx2", "avx512": "avx512", "avx512_bf16": "avx512 avx512_bf16"}


@pytest.fixture
def library(cpu_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The CPU library, limited as in training after the test."""
    yield cpu_library
    monkeypatch.undo()
    limit_isa(cpu_library, None)


def test_the_limit_of_training_is_the_environments(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_isa(library, None)
    usual = library.gptlite_cpu_isa()
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert limit_isa(library, None)
    best = library.gptlite_cpu_isa()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert limit_isa(library, None)
    assert library.gptlite_cpu_isa() == b"baseline"
    monkeypatch.undo()
    assert limit_isa(library, None)
    assert library.gptlite_cpu_isa() == usual
    assert len(usual) <= len(best) or usual == b"baseline"


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_is_that_of_the_cpu_or_refused(library: ctypes.CDLL, level: str) -> None:
    limit_isa(library, "baseline")
    if limit_isa(library, level):
        assert library.gptlite_cpu_isa().decode() == ISA.get(level, "avx512 avx512_bf16 amx_bf16")
    else:
        assert level not in LOWER


@on((BEST,))
def test_the_best_backend_uses_what_training_uses(backend: Backend, library: ctypes.CDLL) -> None:
    found = library.gptlite_cpu_isa().decode().split()
    assert ("amx" if found[-1] == "amx_bf16" else found[-1]) in [*LOWER, cpu_level()]
