"""Areas of the product, and the seeded choice of faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fault_trials.cpp_faults import cpp_faults
from fault_trials.fault import Fault, read_sources
from fault_trials.python_faults import python_faults, same_code

# The files of each area. A file that several areas match belongs to the first.
AREAS: dict[str, tuple[str, ...]] = {
    "configuration": (
        *("gptlite/config/**/*.py", "gptlite/satellites/deepspeed/*.py", "gptlite/start/*.py", "gptlite/launch/*.py"),
        "gptlite/**/*config.py",
    ),
    "kernels": (
        *("kernels/cpu/*.cpp", "kernels/cpu/*.h", "kernels/binding/*.cpp", "kernels/binding/*.h"),
        "kernels/include/*.h",
        *(f"kernels/{name}.py" for name in "activation build cache fakes info library tables toolchain units".split()),
    ),
    "collectives": (
        *(
            "gptlite/parallelism/*.py",
            "gptlite/satellites/monitor/*.py",
            "gptlite/satellites/nvme/*.py",
            "gptlite/ops/cross_entropy.py",
            "gptlite/ops/embedding.py",
        ),
        *("gptlite/ops/linear.py", "gptlite/models/parallel_layers.py"),
    ),
    "data order": (
        "gptlite/data/*.py",
        "gptlite/satellites/corpus/*.py",
        "gptlite/satellites/images/*.py",
        "gptlite/satellites/samples/*.py",
    ),
    "checkpoint": (
        *(
            "gptlite/checkpoint/*.py",
            "gptlite/satellites/checkpoint_tool/*.py",
            "gptlite/satellites/huggingface/*.py",
            "gptlite/files.py",
        ),
    ),
    "planner": ("gptlite/satellites/plan/*.py",),
    "training step": (
        *("gptlite/trainer/*.py", "gptlite/models/**/*.py", "gptlite/optimizer/*.py", "gptlite/ops/*.py"),
        "gptlite/precision.py",
    ),
}
CPP = (".cpp", ".h")
CAP = 1.5  # largest number of faults of a file, relative to its share of the area's lines
AMX = "amx"  # files of a unit that few processors have


def draw(root: Path, seed: int, count: int, areas: dict[str, tuple[str, ...]] | None = None) -> dict[str, list[Fault]]:
    """Return the faults of each area, in the order in which they are tried.

    The first `count / areas` of an area are its share; more follow, to replace those that turn out to have no effect.
    Faults are ranked by a hash of the seed and their text, so a change of a file moves only its own faults.
    """
    areas = AREAS if areas is None else areas
    taken: set[str] = set()
    chosen = {}
    for area, patterns in areas.items():
        files = [file for file in read_sources(root, patterns) if file not in taken]
        taken.update(files)
        chosen[area] = _ordered(root, files, area, seed, -(-count // len(areas)))
    return chosen


def select(root: Path, records: Iterable[dict[str, Any]]) -> tuple[dict[str, list[Fault]], list[dict[str, Any]]]:
    """Return the faults of earlier records, by area, and the records whose line has changed."""
    chosen: dict[str, list[Fault]] = {}
    known: dict[str, dict[str, Fault]] = {}
    lost = []
    for record in records:
        file = record["file"]
        if file not in known:
            known[file] = {fault.id: fault for fault in faults_of(root, file)} if (root / file).is_file() else {}
        if record["id"] in known[file]:
            chosen.setdefault(record["area"], []).append(replace(known[file][record["id"]], area=record["area"]))
        else:
            lost.append(record)
    return chosen, lost


def shares(areas: Sequence[str], count: int) -> dict[str, int]:
    """Return the number of faults of each area; the first areas get one more if `count` is not divisible."""
    size, more = divmod(count, len(areas))
    return {area: size + (index < more) for index, area in enumerate(areas)}


def faults_of(root: Path, file: str) -> list[Fault]:
    """Return all possible faults of a file of `root`."""
    source = (root / file).read_bytes()
    if file.endswith(CPP):
        return [] if AMX in file and not _has_amx() else cpp_faults(file, source)
    return python_faults(file, source)


def _ordered(root: Path, files: list[str], area: str, seed: int, share: int) -> list[Fault]:
    sources = {file: (root / file).read_bytes() for file in files}
    lines = {file: source.count(b"\n") for file, source in sources.items()}
    total = max(1, sum(lines.values()))
    ranked = sorted((fault for file in files for fault in faults_of(root, file)), key=lambda fault: fault.rank(seed))
    by_file, by_function = Counter[str](), Counter[tuple[str, str]]()
    first: list[Fault] = []
    later: list[Fault] = []
    for fault in ranked:
        if len(first) == share and len(later) >= share:
            break
        function = fault.file, fault.function
        cap = max(1, round(CAP * share * lines[fault.file] / total))
        fits = len(first) < share and by_file[fault.file] < cap and not by_function[function]
        if by_function[function] > 1 or not (fits or len(later) < share) or not _changes(sources[fault.file], fault):
            continue
        (first if fits else later).append(replace(fault, area=area))
        by_file[fault.file] += fits
        by_function[function] += fits
    return first + later


def _changes(source: bytes, fault: Fault) -> bool:
    return fault.file.endswith(CPP) or same_code(source, fault.apply(source)) is False


def _has_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
