"""The driver without torch (driver/), on this CPU's instruction sets, and on ARM's under an emulator."""

import lzma
import os
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptlite.kernels.build import compile_all, link
from gptlite.kernels.toolchain import Compiler, find_cxx
from gptlite.kernels.units import ROOT, Unit, cpu_units
from kernels import library
from kernels.cases import LOWER
from kernels.driver.neon_faults import NEON_FAULTS, NeonFault
from kernels.driver.record import KNOWN

HERE = Path(__file__).parent / "driver"
CROSS, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
# A CPU model of qemu 7.2 with BF16, and two without; the lines that the driver prints there.
MODELS = {"max": ["neon", "neon neon_bf16"], "cortex-a76": ["neon"], "cortex-a57": ["neon"]}
with_emulator = pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which(EMULATOR)),
    reason="no g++-aarch64-linux-gnu and qemu-user, as the packages of Debian are called",
)


def compiled_driver(folder: Path, cxx: str) -> Path:
    program = folder / f"driver-{Path(cxx).name}"
    flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}")
    subprocess.run([cxx, *flags, str(HERE / "driver.cpp"), "-o", str(program), "-ldl"], check=True)
    return program


def unpacked(folder: Path) -> Path:
    calls = folder / "calls"
    calls.write_bytes(lzma.decompress((HERE / "calls.xz").read_bytes()))
    return calls


def sets_of(output: str) -> dict[str, tuple[int, ...]]:
    """The calls, compared elements, unsupported calls and failures of each instruction set."""
    lines = [line.partition(": ") for line in output.splitlines() if " calls unsupported, " in line]
    return {isa: tuple(int(word) for word in rest.split() if word.isdigit()) for isa, _, rest in lines}


def test_every_instruction_set_of_this_cpu(tmp_path: Path) -> None:
    program, calls = compiled_driver(tmp_path, find_cxx().command[-1]), unpacked(tmp_path)
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib")
    }  # torch's ops are in it, too
    command = [str(program), str(library.compiled()), str(calls)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    totals = sets_of(result.stdout)
    assert len(totals) >= len(LOWER)
    for isa, (count, elements, unsupported, failures) in totals.items():
        assert (count > 300, elements > 60_000, failures) == (True, True, 0)
        assert (unsupported == 0) is ("bf16" in isa)  # the weight gradients

    # Another result than the stored one is a failure, with any instruction set.
    content = calls.read_bytes()
    answer = struct.pack("<4I", *KNOWN[0][2])
    assert content.count(answer) == 1
    calls.write_bytes(content.replace(answer, answer[::-1]))
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stdout.count("philox: buffer 0: 4 of 4 elements are off")) == (1, len(totals))
    calls.write_bytes(content[:-1])
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stderr) == (2, "the file ends early\n")


class Arm:
    """The CPU kernels and the driver, compiled for aarch64."""

    def __init__(self, folder: Path) -> None:
        version = subprocess.run([CROSS, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        self.folder, self.cxx = folder, Compiler((CROSS,), version)
        self.units = {unit.label: unit for unit in cpu_units(self.cxx)}
        self.objects = compile_all(list(self.units.values()), folder, print, "CPU kernels")
        self.driver, self.calls = compiled_driver(folder, CROSS), unpacked(folder)

    def library(self, *changed: Path) -> Path:
        """The library with other objects in place of those of the same name."""
        names = [path.name for path in changed]
        objects = [path for path in self.objects if path.name not in names]
        path = self.folder / "libgptlite_cpu.so"
        link(self.cxx, [*objects, *changed], [], self.folder, path)
        return path

    def run(self, model: str, path: Path) -> subprocess.CompletedProcess[str]:
        command = [EMULATOR, "-cpu", model, "-L", str(SYSROOT), str(self.driver), str(path), str(self.calls)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def compiled_with(self, fault: NeonFault) -> Path:
        """The object of the fault's unit."""
        tree = self.folder / "planted"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(ROOT / "cpu", tree / "cpu")
        text = (tree / "cpu" / fault.file).read_text()
        assert text.count(fault.old) == 1, f"{fault.file} has {text.count(fault.old)} times: {fault.old}"
        (tree / "cpu" / fault.file).write_text(text.replace(fault.old, fault.new))
        unit = self.units[fault.unit]
        planted = replace(unit, source=tree / "cpu" / unit.source.name)
        (path,) = compile_all([planted], tree, print, "CPU kernels")
        return path


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Arm:
    return Arm(tmp_path_factory.mktemp("arm"))


@with_emulator
@pytest.mark.long
def test_arm_with_and_without_bf16(arm: Arm) -> None:
    path = arm.library()
    for model, expected in MODELS.items():
        result = arm.run(model, path)
        assert result.returncode == 0, result.stdout + result.stderr
        totals = sets_of(result.stdout)
        assert list(totals) == expected
        for isa, (count, elements, unsupported, failures) in totals.items():
            assert (count > 300, elements > 60_000, failures) == (True, True, 0)
            assert (unsupported == 0) is ("bf16" in isa)


@with_emulator
@pytest.mark.long
def test_faults_of_the_neon_lanes_are_found(arm: Arm) -> None:
    missed = []
    for fault in NEON_FAULTS:
        result = arm.run("max", arm.library(arm.compiled_with(fault)))
        if result.returncode != 1 or " are off" not in result.stdout:
            missed.append(f"{fault.what}: {result.returncode} {result.stdout[-300:]}{result.stderr}")
    assert not missed, "\n".join(missed)


def test_arm_has_its_own_units() -> None:
    class Arms(Compiler):
        def accepts(self, flags: tuple[str, ...]) -> bool:
            return all(flag.startswith("-march=armv8") for flag in flags)

    class OldArms(Compiler):
        def accepts(self, flags: tuple[str, ...]) -> bool:
            return flags == ("-march=armv8-a",)

    class Others(Compiler):
        def accepts(self, flags: tuple[str, ...]) -> bool:
            return False

    def labels(kind: type[Compiler]) -> tuple[set[str], list[Unit]]:
        units = cpu_units(kind(("c++",), "1"))
        return {unit.label.partition("-")[2] for unit in units}, units

    assert labels(Arms)[0] == {"", "neon", "neon_bf16"}
    assert labels(Others)[0] == {"", "baseline"}
    names, units = labels(OldArms)
    assert names == {"", "neon"}
    assert all("-DGPTLITE_NO_BF16" in unit.command for unit in units if unit.label == "dispatch")
