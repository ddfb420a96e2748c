"""The kernel tests find faults planted in the CUDA sources (faults.txt): each in a copy, compiled for the emulator."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.emulator import KERNELS, Change, Emulated, EmulatorError, build_emulated, emulated, unload
from kernels.fault_checks import CHECKS, SOURCES

TABLE = Path(__file__).with_name("faults.txt")
SIGNS = {
    "race": "race: ",
    "outside": "out of bounds: ",
    "unwritten": "nothing was written to",
    "diverged": "which has exited|waits at|of a block of",
    "mask": "does not name|leaves out its own",
    "misaligned": "misaligned",
    "overflow": "overflow of a signed",
    "values": "^$",  # the emulator says nothing
}
QUICK = {"norm", "adamw"}  # ops that take a second to compile
FIRST = 1  # faults of a quick op that are always planted
SLOW = 3  # faults of an op that are not among the long tests


@dataclass(frozen=True)
class Fault:
    """`old` stands once in `file`; `sign`: a pattern of what the emulator says."""

    op: str
    what: str
    file: Path
    sign: str
    old: str
    new: str


def faults() -> list[Fault]:
    found = []
    for block in re.split(r"\n\n+", TABLE.read_text().strip()):
        head, *lines = block.split("\n")
        if head.count(" | ") != 3 or not lines:
            continue  # what the table says of itself
        op, file, signs, what = head.split(" | ")
        old, new = ("\n".join(line[1:] for line in lines if line[0] == side) for side in "-+")
        sign = "|".join(SIGNS[each] for each in signs.split(" or "))
        found.append(Fault(op, what, (KERNELS / "cuda" / file).resolve(), sign, old, new))
    return found


FAULTS = faults()


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    assert request.config.cache is not None
    return Path(request.config.cache.mkdir("gptlite-emulator"))


@contextmanager
def built(op: str, folder: Path, changes: Sequence[Change] = ()) -> Iterator[Emulated]:
    path = build_emulated(folder, [KERNELS / "cuda" / name for name in SOURCES[op]], changes)
    backend = emulated(path)
    try:
        yield backend
    finally:
        unload(backend.library)
        if changes:
            path.unlink()


def test_the_table_is_read_whole() -> None:
    assert len(FAULTS) == len(re.findall(r"^[a-z_]+ \| ", TABLE.read_text(), flags=re.MULTILINE)) >= 80
    assert {fault.op for fault in FAULTS} == set(CHECKS) == set(SOURCES)
    assert all(fault.old and fault.old != fault.new for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.op}-{fault.what}")
def test_no_fault_is_stale(fault: Fault) -> None:
    assert fault.file.read_text().count(fault.old) == 1


@pytest.mark.parametrize("op", [op if op in QUICK else pytest.param(op, marks=pytest.mark.slow) for op in CHECKS])
def test_the_sources_as_they_are_pass(op: str, folder: Path) -> None:
    with built(op, folder) as backend:
        CHECKS[op](backend)


def cases() -> list[object]:
    """The first fault of each quick op, always run; the first ones of all ops in the slow tests; the rest are long."""
    params = []
    for op in CHECKS:
        for i, fault in enumerate(each for each in FAULTS if each.op == op):
            mark = () if op in QUICK and i < FIRST else pytest.mark.slow if i < SLOW else pytest.mark.long
            params.append(pytest.param(fault, id=f"{op}-{fault.what}", marks=mark))
    return params


@pytest.mark.parametrize("fault", cases())
def test_a_fault_is_found(fault: Fault, folder: Path) -> None:
    change = str(fault.file.relative_to(KERNELS.resolve())), fault.old, fault.new
    with built(fault.op, folder, [change]) as backend, pytest.raises(AssertionError) as caught:
        CHECKS[fault.op](backend)
    said = str(caught.value) if isinstance(caught.value, EmulatorError) else ""
    assert re.search(fault.sign, said), str(caught.value)
