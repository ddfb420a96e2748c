"""The CUDA sources by nvcc: they compile for every architecture, and no kernel's registers spill to memory."""

import re
import subprocess
from pathlib import Path

import pytest

from gptlite.kernels.toolchain import BuildError, Compiler, find_cxx, find_nvcc
from gptlite.kernels.units import ROOT, cuda_units

SOURCES = sorted(path.stem for path in (ROOT / "cuda").glob("*.cu"))
ARCHITECTURES = ("sm_80", "sm_90")


@pytest.fixture(scope="module")
def nvcc() -> Compiler:
    try:
        return find_nvcc()
    except BuildError as error:
        pytest.skip(str(error))


def spills(report: str) -> dict[tuple[str, str], int]:
    """Bytes of spill stores and loads of each kernel and architecture, from what `ptxas -v` prints."""
    found, kernel = {}, ("", "")
    for line in report.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernel = entry[1], entry[2]
        if bytes_ := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found[kernel] = int(bytes_[1]) + int(bytes_[2])
    return found


def test_spills_are_read_from_a_report() -> None:
    report = """ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90'
ptxas info    : Function properties for _Z1fPf
    40 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function '_Z1gPf' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"""
    assert spills(report) == {("_Z1fPf", "sm_90"): 20, ("_Z1gPf", "sm_90"): 0}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_no_kernel_spills(nvcc: Compiler, source: str, tmp_path: Path) -> None:
    (unit,) = (each for each in cuda_units(nvcc, find_cxx()) if each.source.stem == source)
    command = [*unit.command, "-Xptxas", "-v", "-c", str(unit.source), "-o", str(tmp_path / "object.o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr
    found = spills(result.stderr)
    assert {architecture for _, architecture in found} == set(ARCHITECTURES)
    assert {kernel: count for kernel, count in found.items() if count} == {}
