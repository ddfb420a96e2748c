"""Plant the faults of fault_trials/cuda_faults.txt in the CUDA sources, one at a time, and run the kernel tests.

python tools/faults.py cuda [ops=norm,adamw] [first=N]

Each fault is planted in a copy, which is compiled for the emulator and runs on the CPU: some seconds to a minute per
fault. `first` limits the number of faults per op. Exit codes: 0 if every fault is caught as the table states,
otherwise 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from gptlite.errors import ConfigError
from gptlite.progress import log

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "kernels" / "cuda"
TABLE = Path(__file__).with_name("cuda_faults.txt")
OBJECTS = ROOT / ".pytest_cache" / "d" / "gptlite-emulator"  # also used by the kernel tests
SIGNS = {
    "race": "race: ",
    "outside": "out of bounds: ",
    "unwritten": "nothing was written to",
    "diverged": "which has exited|waits at|of a block of",
    "mask": "does not name|leaves out its own",
    "misaligned": "misaligned",
    "overflow": "overflow of a signed",
    "values": "^$",  # no message of the emulator
}


@dataclass
class Options:
    """Command-line options."""

    ops: str | None = None
    first: int | None = None


@dataclass(frozen=True)
class CudaFault:
    """Replacement of `old`, which occurs once in `file`, by `new`; `sign` matches the emulator's message."""

    op: str
    what: str
    file: Path
    sign: str
    old: str
    new: str

    @property
    def stale(self) -> bool:
        """True unless the source contains the text exactly once."""
        return self.file.read_text().count(self.old) != 1


def read_faults() -> list[CudaFault]:
    """Return the faults of the table."""
    faults = []
    for block in re.split(r"\n\n+", TABLE.read_text().strip()):
        head, *lines = block.split("\n")
        if head.count(" | ") != 3 or not lines:
            continue  # the explanation at the top
        op, file, signs, what = head.split(" | ")
        old, new = ("\n".join(line[1:] for line in lines if line[0] == side) for side in "-+")
        sign = "|".join(SIGNS[name] for name in signs.split(" or "))
        faults.append(CudaFault(op, what, (CUDA / file).resolve(), sign, old, new))
    return faults


def chosen(options: Options) -> dict[str, list[CudaFault]]:
    """Return the faults to plant, by op. Raises ConfigError."""
    faults: dict[str, list[CudaFault]] = {}
    for fault in read_faults():
        faults.setdefault(fault.op, []).append(fault)
    ops = list(faults) if options.ops is None else options.ops.split(",")
    for op in ops:
        if op not in faults:
            raise ConfigError(f"ops={options.ops}: {op} is not one of {', '.join(faults)}")
    if options.first is not None and options.first < 1:
        raise ConfigError(f"first={options.first} must be at least 1")
    return {op: faults[op][: options.first] for op in ops}


def run(options: Options) -> int:
    """Plant the faults and return the exit code. Raises ConfigError."""
    faults = chosen(options)
    if not (ROOT / "tests" / "kernels").is_dir():
        raise ConfigError("the kernel tests are in tests/kernels, which an installed package lacks; use a checkout")
    sys.path.insert(0, str(ROOT / "tests"))
    checks = import_module("kernels.fault_checks")
    missed = 0
    for op, planted in faults.items():
        with emulated(checks.SOURCES[op]) as backend:
            checks.CHECKS[op](backend)  # raises if the sources fail without a fault
        for fault in planted:
            verdict = tried(fault, checks.SOURCES[op], checks.CHECKS[op])
            missed += verdict != "caught"
            log(f"{op}: {fault.what}: {verdict}")
    total = sum(map(len, faults.values()))
    print(f"{total - missed} of {total} faults are caught")
    return 1 if missed else 0


def tried(fault: CudaFault, sources: tuple[str, ...], check: Callable[[Any], None]) -> str:
    """Return `caught`, or what went wrong instead."""
    if fault.stale:
        return f"stale: {fault.file.name} does not contain the text exactly once"
    change = str(fault.file.relative_to((ROOT / "kernels").resolve())), fault.old, fault.new
    try:
        with emulated(sources, change) as backend:
            check(backend)
    except AssertionError as error:
        told = str(error) if type(error).__name__ == "EmulatorError" else ""
        return "caught" if re.search(fault.sign, told) else f"caught, but not as the table states: {error}"
    return "not caught"


@contextmanager
def emulated(sources: tuple[str, ...], *changes: tuple[str, str, str]) -> Iterator[Any]:
    """Compile CUDA sources for the emulator. A library with changes is deleted afterwards."""
    emulator = import_module("kernels.emulator")
    path = emulator.build_emulated(OBJECTS, [CUDA / name for name in sources], changes)
    backend = emulator.emulated(path)
    try:
        yield backend
    finally:
        emulator.unload(backend.library)
        if changes:
            path.unlink()
