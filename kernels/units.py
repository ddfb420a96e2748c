"""Compilation units with their flags. A unit is one source file for one instruction set."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptlite.kernels.toolchain import Compiler

ROOT = Path(__file__).parent
# Oldest torch version (2.10) with which the library runs, through torch's stable ABI.
TORCH_TARGET = "0x020a000000000000"

COMMON = (
    *"-std=c++17 -O3 -fPIC -fno-math-errno -fno-trapping-math -fvisibility=hidden -ffp-contract=fast".split(),
    "-w",  # users should not see compiler warnings
)
_AVX512 = tuple("-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512".split())
# Of x86-64. Only CPUs from before 2013 use the baseline. -O1 keeps it from taking half of the compilation time.
ISAS = {"baseline": ("-O1",), "avx2": ("-mavx2", "-mfma", "-mf16c"), "avx512": _AVX512}
# Files for a single instruction set, by file name suffix: the set's name, its flags, and the macro if they are missing.
EXTRA = {
    "_bf16": ("avx512_bf16", (*_AVX512, "-mavx512bf16"), "-DGPTLITE_NO_BF16"),
    "_amx": ("amx", (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), "-DGPTLITE_NO_AMX"),
}
ARM_ISAS = {"neon": ("-march=armv8-a",)}
ARM_EXTRA = {"_bf16": ("neon_bf16", ("-march=armv8.2-a+bf16",), "-DGPTLITE_NO_BF16")}
NVCC = ("-std=c++17", "-O3", "-Xcompiler=-fPIC", "-w")
# Code for any GPU from sm_80 on. GPUs after sm_90 use the compute_90 PTX, which the driver compiles.
PORTABLE = ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]")
OLDEST_PORTABLE = 80


@dataclass(frozen=True)
class Unit:
    """A source file and the command that compiles it."""

    source: Path
    label: str  # unique: the object file's name
    command: tuple[str, ...]

    @property
    def weight(self) -> int:
        """Estimate of the compilation time: bytes of the source and of our headers that it includes."""
        text = self.source.read_text(encoding="utf-8")
        headers = (self.source.parent / name for name in re.findall(r'#include "(\S+)"', text))
        return 1000 + len(text) + sum(path.stat().st_size for path in headers if path.is_file())


def cpu_units(cxx: Compiler) -> list[Unit]:
    """Return the units of the CPU kernels. Most files have one unit per instruction set; some are compiled once."""
    isas, extra = (ARM_ISAS, ARM_EXTRA) if cxx.accepts(ARM_ISAS["neon"]) else (ISAS, EXTRA)
    isas = isas if cxx.accepts(tuple(isas.values())[-1]) else {"baseline": ()}
    extra = {end: each for end, each in extra.items() if cxx.accepts(each[1])}
    lacking = [each[2] for end, each in EXTRA.items() if end not in extra]
    start = (*cxx.command, *COMMON, *_prefix_map(), f"-I{ROOT / 'include'}")
    units = []
    for source in sorted((ROOT / "cpu").glob("*.cpp")):
        end = next((end for end in EXTRA if source.stem.endswith(end)), None)
        if source.stem == "dispatch" or source.stem.endswith("workspace"):
            units.append(Unit(source, source.stem, (*start, *lacking)))
        elif end is None:
            units += (_for_isa(source, start, isa, flags) for isa, flags in isas.items())
        elif end in extra:
            units.append(_for_isa(source, start, *extra[end][:2]))
    return units


def binding_units(cxx: Compiler, torch_include: Path, cuda: bool) -> list[Unit]:
    """Return the units of the torch ops."""
    flags = (*COMMON, "-O1", *_prefix_map(), f"-I{ROOT / 'include'}", f"-isystem{torch_include}")
    command = (*cxx.command, *flags, f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", *(("-DUSE_CUDA",) if cuda else ()))
    return [Unit(source, f"binding-{source.stem}", command) for source in sorted((ROOT / "binding").glob("*.cpp"))]


def cuda_units(nvcc: Compiler, cxx: Compiler, arch: str = "") -> list[Unit]:
    """Return the units of the CUDA kernels, for one architecture ("90") or, by default, for any from sm_80 on."""
    code = (f"-gencode=arch=compute_{arch},code=sm_{arch}",) if arch else PORTABLE
    host = next(part for part in reversed(cxx.command) if not part.startswith("-"))  # CXX may be "ccache g++ -m64"
    command = (*nvcc.command, "-ccbin", host, *NVCC, *code, f"-I{ROOT / 'include'}")
    return [Unit(source, f"cuda-{source.stem}", command) for source in sorted((ROOT / "cuda").glob("*.cu"))]


def sources(cuda: bool) -> Iterator[Path]:
    """Yield all files that a library depends on, including units.py and build.py for their flags."""
    yield from (ROOT / "units.py", ROOT / "build.py")
    for folder in ("include", "cpu", "binding", *(("cuda",) if cuda else ())):
        yield from sorted(path for path in (ROOT / folder).glob("*.*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))


def _for_isa(source: Path, start: tuple[str, ...], isa: str, flags: tuple[str, ...]) -> Unit:
    return Unit(source, f"{source.stem}-{isa}", (*start, f"-DGPTLITE_ISA={isa}", *flags))


def _prefix_map() -> tuple[str, ...]:
    return (f"-ffile-prefix-map={ROOT}=gptlite/kernels",)  # makes the library independent of the source folder
