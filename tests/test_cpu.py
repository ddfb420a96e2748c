"""The CPU's name and instruction sets, and the limits that torch and oneDNN take from the environment."""

import builtins
import ctypes
import io

import pytest
from cpu_levels import cpu_level

from gptlite.cpu import LEVELS, LIMITS, cpu_flags, cpu_name, level_limit
from gptlite.kernels.library import LoadedLibrary, _limited, load

CPUINFO = (
    "processor\t: 0\nmodel name\t: AMD EPYC 9R14\n"
    "flags\t\t: fpu sse4_1 avx avx2 fma avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16\nflags\t\t: fpu\n"
)
EVERY = set("fpu sse4_1 avx avx2 fma avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16".split())
OF_BF16, OF_AMX = {"avx512_bf16", "avx512_fp16"}, {"amx_tile", "amx_bf16"}
OF_AVX512 = OF_BF16 | OF_AMX | {"avx512f", "avx512_vnni"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU with every instruction set, without limits."""
    monkeypatch.setattr(builtins, "open", lambda *_: io.StringIO(CPUINFO))
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_cpuinfo_is_read(machine):
    assert (cpu_flags(), cpu_level(), cpu_name()) == (EVERY, "amx", "AMD EPYC 9R14")


def test_arm_has_features_and_no_level(machine):
    text = "processor\t: 0\nFeatures\t: fp asimd aes bf16\nCPU implementer\t: 0x41\n"
    machine.setattr(builtins, "open", lambda *_: io.StringIO(text))
    assert (cpu_flags(), cpu_level(), cpu_name()) == ({"fp", "asimd", "aes", "bf16"}, "baseline", "")


@pytest.mark.parametrize(
    ("name", "value", "level", "without"),
    [
        ("ATEN_CPU_CAPABILITY", "default", "baseline", OF_AVX512 | {"avx", "avx2", "fma"}),
        ("ATEN_CPU_CAPABILITY", "avx2", "avx2", OF_AVX512),
        ("ATEN_CPU_CAPABILITY", "avx512", "amx", set()),
        ("ONEDNN_MAX_CPU_ISA", "SSE41", "baseline", OF_AVX512 | {"avx", "avx2", "fma"}),
        ("ONEDNN_MAX_CPU_ISA", "avx2", "avx2", OF_AVX512),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", "avx512", OF_BF16 | OF_AMX),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "avx512_bf16", OF_AMX | {"avx512_fp16"}),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", "avx512_bf16", OF_AMX),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", "amx", set()),
        ("ONEDNN_MAX_CPU_ISA", "ALL", "amx", set()),
    ],
)
def test_a_limit_of_torch_or_onednn_hides_what_is_above_it(machine, name, value, level, without):
    machine.setenv(name, value)
    assert (level_limit(), cpu_level(), cpu_flags()) == (level, level, EVERY - without)


def test_the_lower_of_two_limits_holds(machine):
    machine.setenv("ATEN_CPU_CAPABILITY", "avx2")
    machine.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert level_limit() == "avx2"


def test_no_cpuinfo_assumes_nothing(monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(builtins, "open", missing)
    assert (cpu_flags(), cpu_level(), cpu_name()) == (set(), "baseline", "")


def test_our_kernels_use_what_torch_and_onednn_may_use(kernels, monkeypatch):
    loaded = load("cpu")
    assert isinstance(loaded, LoadedLibrary)
    library = ctypes.CDLL(str(loaded.path))
    try:
        for name in LIMITS:
            monkeypatch.delenv(name, raising=False)
        library.gptlite_cpu_limit_isa(None)
        here = list(LEVELS).index(_level(_limited(library)))
        assert here <= list(LEVELS).index(cpu_level())  # an old compiler lacks the last ones
        for level, limit in zip(LEVELS, ("SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16"), strict=False):
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
            assert list(LEVELS).index(_level(_limited(library))) == min(here, list(LEVELS).index(level))
    finally:
        monkeypatch.undo()
        library.gptlite_cpu_limit_isa(None)
        assert _limited(library) == loaded.isa


def _level(isa: str) -> str:
    last = isa.split()[-1]
    return "amx" if last == "amx_bf16" else last
