"""Machine code of the CUDA kernels: what nvdisasm prints of a cubin, counted."""

import os
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gptlite.kernels.toolchain import find_nvcc

PACKAGE = "nvidia-cuda-nvdisasm"
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


@dataclass
class Kernel:
    """Instructions of a kernel in order, subroutines of the compiler (slow paths of divisions) and padding left out."""

    name: str  # demangled, without namespaces and arguments: forward_held<Bf16, 8, 24>
    opcodes: list[str] = field(default_factory=list)  # with modifiers: STG.E.128
    loops: list[tuple[int, int]] = field(default_factory=list)  # first and last instruction of each backward branch

    def part(self, name: str) -> list[str]:
        """`kernel`: all of it. `read`, `write`: the largest innermost loop with 128-bit global loads, or stores; where
        there are none, with 64-bit ones."""
        if name == "kernel":
            return self.opcodes
        kind = {"read": "LDG", "write": "STG"}[name]
        found = [(loop, widths(self.opcodes[loop[0] : loop[1] + 1], kind)) for loop in self.loops]
        most = 128 if any(counts[128] for _, counts in found) else 64  # packs of e5m2 are of 8 bytes
        bodies = [loop for loop, counts in found if counts[most]]
        inner = [(a, b) for a, b in bodies if not any((a, b) != (c, d) and a <= c and d <= b for c, d in bodies)]
        return max((self.opcodes[a : b + 1] for a, b in inner), key=len, default=[])


def widths(opcodes: list[str], kind: str) -> Counter[int]:
    """How many loads or stores there are of each width in bits."""
    found: Counter[int] = Counter()
    for opcode in opcodes:
        head, *modifiers = opcode.split(".")
        if head == kind:
            found[next((_WIDTHS[each] for each in modifiers if each in _WIDTHS), 32)] += 1
    return found


def find_nvdisasm(folders: Iterable[Path] | None = None) -> Path:
    """The disassembler in `folders`: None for those of CUDA, PATH and PyPI's package. Raises FileNotFoundError."""
    if folders is None:
        packages = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin"))
        nvcc = Path(find_nvcc().command[0]).resolve().parent
        folders = [*packages, nvcc, *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    for folder in folders:
        if (folder / "nvdisasm").is_file():
            return folder / "nvdisasm"
    raise FileNotFoundError(f"nvcc is here but nvdisasm is not: pip install {PACKAGE} (the dev extra has it)")


def kernels(nvdisasm: Path, cubin: Path) -> dict[str, Kernel]:
    """The kernels of a cubin by name."""
    listing = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True, timeout=120).stdout
    return parse(listing)


def parse(listing: str) -> dict[str, Kernel]:
    """The kernels in what nvdisasm prints."""
    found: dict[str, Kernel] = {}
    for text in re.split(r"^//-+ \.text\.(?=\w)", listing, flags=re.MULTILINE)[1:]:
        kernel = parse_kernel(text)
        found[kernel.name] = kernel
    return found


def parse_kernel(text: str) -> Kernel:
    kernel = Kernel(demangle(text.split()[0]))
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if re.match(r"\s*\.type\s+\$", line):
            break  # a subroutine
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(kernel.opcodes)
        if code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", line):
            target = re.search(r"`\((\.L_x_\d+)\)", line)
            if code[1].startswith("BRA") and target and target[1] in labels:
                if labels[target[1]] == len(kernel.opcodes):
                    break  # a branch to itself: only padding follows
                kernel.loops.append((labels[target[1]], len(kernel.opcodes)))
            kernel.opcodes.append(code[1])
    return kernel


def demangle(symbol: str) -> str:
    text = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout.strip()
    text = re.sub(r"_GLOBAL__N__\w+?_cu_[0-9a-f_]+::|\(anonymous namespace\)::|gptlite::", "", text).removeprefix(
        "void "
    )
    text = re.sub(r"\((int|bool)\)(\w+)", lambda m: str(bool(int(m[2]))).lower() if m[1] == "bool" else m[2], text)
    depth = 0
    for i, letter in enumerate(text):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return text[:i]
    return text
