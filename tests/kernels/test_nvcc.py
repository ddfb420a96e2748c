"""The CUDA sources by nvcc: they compile for every architecture, no kernel's registers spill to memory, and the machine
code keeps to its budget of stores, loads and instructions (sass_budget.txt)."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from gptlite.kernels.toolchain import BuildError, Compiler, find_cxx, find_nvcc
from gptlite.kernels.units import ROOT, cuda_units
from kernels.sass import PACKAGE, Kernel, find_nvdisasm, kernels, parse, widths

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


@dataclass(frozen=True)
class Budget:
    """A row of the table."""

    source: str
    kernel: str
    part: str
    elements: int
    stores: str
    loads: str
    most: dict[str, int]  # instructions a 32 elements, by architecture


def budgets() -> list[Budget]:
    rows = [line.split("|") for line in Path(__file__).with_name("sass_budget.txt").read_text().splitlines()]
    found = []
    for row in rows:
        if len(row) != 8 or row[0].strip() == "source":
            continue  # what the table says of itself
        source, kernel, part, elements, stores, loads, *most = (cell.strip() for cell in row)
        by_name = dict(zip(ARCHITECTURES, map(int, most), strict=True))
        found.append(Budget(source, kernel, part, int(elements), stores, loads, by_name))
    return found


def by_width(opcodes: list[str], kind: str) -> str:
    """As the table writes it: 4x128 2x32."""
    return " ".join(f"{n}x{bits}" for bits, n in sorted(widths(opcodes, kind).items(), reverse=True)) or "-"


def over_budget(budget: Budget, found: dict[str, Kernel], architecture: str) -> list[str]:
    """What a kernel's machine code does not keep to."""
    if budget.kernel not in found:
        return [f"{budget.kernel}: no such kernel"]
    body = found[budget.kernel].part(budget.part)
    wrong = []
    for what, kind, wanted in (("stores", "STG", budget.stores), ("loads", "LDG", budget.loads)):
        if (here := by_width(body, kind)) != wanted:
            wrong.append(f"{what} {here}, not {wanted}")
    instructions, most = len(body) * 32 / budget.elements, budget.most[architecture]
    if instructions > most:
        wrong.append(f"{instructions:.0f} instructions a 32 elements, more than {most}")
    return [f"{budget.kernel}, {budget.part}: {words}" for words in wrong]


LISTING = """//--------------------- .text._Z1fPf --------------------------
        .type           _Z1fPf,@function
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.128 R8, desc[UR20][R14.64] ;
        /*0020*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0030*/                   STG.E.U16 desc[UR4][R2.64], R8 ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/                   STG.E desc[UR4][R2.64], R8 ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
        /*0080*/                   NOP;
"""


def test_machine_code_is_counted_from_a_listing() -> None:
    found = parse(LISTING)
    assert set(found) == {"f"}
    assert len(found["f"].part("kernel")) == 7  # no padding
    assert by_width(found["f"].part("kernel"), "STG") == "1x128 1x32 1x16"
    loop = found["f"].part("write")
    assert loop == found["f"].part("read") == ["LDG.E.128", "STG.E.128", "STG.E.U16", "BRA"]
    good = Budget("f", "f", "write", 8, "1x128 1x16", "1x128", {"sm_90": 16})
    assert over_budget(good, found, "sm_90") == []
    lean = Budget("f", "f", "write", 8, "1x128", "1x128", {"sm_90": 15})
    assert over_budget(lean, found, "sm_90") == [
        "f, write: stores 1x128 1x16, not 1x128",
        "f, write: 16 instructions a 32 elements, more than 15",
    ]


def test_a_missing_disassembler_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"pip install {PACKAGE}"):
        find_nvdisasm([tmp_path])


def test_every_pack_kernel_has_a_budget() -> None:
    assert {budget.source for budget in budgets()} == set(SOURCES) - {"column_sums"}  # it adds up single floats


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_no_kernel_spills_or_exceeds_its_budget(nvcc: Compiler, source: str, tmp_path: Path) -> None:
    nvdisasm = find_nvdisasm()  # where there is nvcc, its absence is a failure
    (unit,) = (each for each in cuda_units(nvcc, find_cxx()) if each.source.stem == source)
    keep = ("-keep", "-keep-dir", str(tmp_path))  # of which the cubins are wanted
    command = [*unit.command, *keep, "-Xptxas", "-v", "-c", str(unit.source), "-o", str(tmp_path / "object.o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert result.returncode == 0, result.stderr
    found = spills(result.stderr)
    assert {architecture for _, architecture in found} == set(ARCHITECTURES)
    assert {kernel: count for kernel, count in found.items() if count} == {}
    wrong = {}
    for architecture in ARCHITECTURES:
        (cubin,) = tmp_path.glob(f"*compute_{architecture.removeprefix('sm_')}*.cubin")
        here = kernels(nvdisasm, cubin)
        wrong[architecture] = [
            line for each in budgets() if each.source == source for line in over_budget(each, here, architecture)
        ]
    assert not any(wrong.values()), "\n".join(f"{name}: {line}" for name, lines in wrong.items() for line in lines)
