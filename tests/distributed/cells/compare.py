"""Cells of the matrix compared with one process: what each rank does, what rank 0 judges by, and the bounds.

The rule of gptlite.satellites.parity.compare judges each tensor by what 16 bits cost it. The bounds are about twice the
largest error of any cell of a precision on any machine so far (docs/parallelism_checks.md has both). They do not grow
with the error of one process.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from distributed.cells.bugs import planted
from distributed.cells.layouts import STEPS, Cell, reference_of
from distributed.cells.run import KeptRanks
from gptlite.config import Config, load
from gptlite.parallelism.config import Offload
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.satellites.parity.compare import (
    Distances,
    StepComparison,
    Tolerances,
    compare,
    distances,
    fp32_limits,
    half_limits,
)
from gptlite.satellites.parity.record import StepRecord, recorded
from gptlite.satellites.parity.report import row, verdict


@dataclass(frozen=True)
class Bounds:
    """The largest distances of any step of any cell."""

    loss: float  # relative
    grad_norm: float  # relative
    gradient: float  # norm of the difference / norm
    value: float  # root mean square / learning rate


STATED = {
    "bf16": Bounds(3e-5, 4e-3, 2e-1, 1.0),
    "fp16": Bounds(6e-6, 6e-4, 8e-3, 0.6),
    "amp_o1": Bounds(3e-6, 4e-4, 8e-3, 0.4),
    "amp_o2": Bounds(6e-6, 6e-4, 8e-3, 0.6),
}


def limits_of(apart: Sequence[Distances] | None, precision: str) -> Tolerances:
    """What a cell must keep; `apart`: how far one process in that precision is from fp32, None in fp32."""
    if apart is None:
        return fp32_limits()
    stated, dtype = STATED[precision], torch.bfloat16 if precision == "bf16" else torch.float16
    limits = half_limits(apart, torch.finfo(dtype).eps)
    return replace(_within(limits, stated), first=_within(limits.at(1), stated))


def _within(limits: Tolerances, stated: Bounds) -> Tolerances:
    return replace(
        limits,
        loss=min(limits.loss, stated.loss),
        grad_norm=min(limits.grad_norm, stated.grad_norm),
        gradient=lambda name: min(limits.gradient(name), stated.gradient),
        value=lambda name: min(limits.value(name), stated.value),
    )


def same_bits(a: object, b: object) -> bool:
    """Whether two tensors are the same to the bit, so that -0 is not 0; other values are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        integers = torch.int32 if a.itemsize == 4 else torch.int16
        return a.shape == b.shape and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))
    return a == b


@dataclass(frozen=True)
class Result:
    """A cell's comparisons, a step each, and the seconds it took, of which rank 0 alone knows."""

    comparisons: list[StepComparison]
    seconds: float


def run_cell(
    config: Config,
    reference: str,
    apart: Sequence[Distances] | None,
    bug: str = "",
    twin: bool = False,
    steps: int = STEPS,
) -> Result | None:
    """On every rank: the first steps of a layout, compared on rank 0 with the reference in a file.

    `apart` is what 16 bits are judged by; None: fp32. `bug` is planted meanwhile, see bugs.py. `twin`: the same
    run without offload must give the same bits. `steps`: how many of the reference's are compared.
    """
    start = time.monotonic()
    limits = limits_of(apart, config.precision.dtype.value)
    mesh = build_mesh(config.parallelism)
    try:
        with planted(bug):
            records = recorded(config, steps, mesh)
            if twin:
                records = same_as_without(records, config, steps, mesh)
            wanted = read_records(reference)[:steps] if mesh.is_main else [None] * steps
            found = [
                compare(step, expected, limits)
                for step, expected in zip(records, wanted, strict=True)
                if step is not None and expected is not None
            ]
    finally:
        mesh.close()
    return Result(found, time.monotonic() - start) if mesh.is_main else None


def same_as_without(
    records: Iterator[StepRecord | None], config: Config, steps: int, mesh: Mesh
) -> Iterator[StepRecord | None]:
    """The steps of a run that offloads, each compared to the bit with the same run's without."""
    plain = replace(config.parallelism, offload=Offload.none, offload_path=None)
    for step, twin in zip(records, recorded(replace(config, parallelism=plain), steps, mesh), strict=True):
        if step is not None and twin is not None:
            assert (step.loss, step.grad_norm, step.lr) == (twin.loss, twin.grad_norm, twin.lr)
            for ours, theirs in ((step.gradients, twin.gradients), (step.values, twin.values)):
                assert ours.keys() == theirs.keys()
                assert [name for name in ours if not torch.equal(ours[name].value, theirs[name].value)] == []
        yield step


def judge(references: References, cell: Cell, result: Result) -> tuple[bool, str]:
    """Whether a cell was the same as one process, and the words for it."""
    return verdict(result.comparisons, limits_of(references.apart(cell), cell.precision))


@lru_cache(maxsize=8)
def read_records(path: str) -> list[StepRecord]:
    return pickle.loads(Path(path).read_bytes())


@lru_cache(maxsize=8)
def _apart(half: str, exact: str) -> list[Distances]:
    return [distances(a, b, rms=True) for a, b in zip(read_records(half), read_records(exact), strict=True)]


class References:
    """One-process runs, made when first asked for, in files of `folder` that ranks read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[tuple[str | int, ...], Path] = {}

    def of(self, cell: Cell, steps: int = STEPS) -> tuple[str, list[Distances] | None]:
        """The file of a cell's reference, with at least so many steps, and what 16 bits are judged by, see `apart`."""
        steps = steps if cell.precision == "fp32" else STEPS
        return str(self._file(reference_of(cell, cell.precision), steps)), self.apart(cell)

    def apart(self, cell: Cell) -> list[Distances] | None:
        """How far one process in a cell's 16 bits is from fp32 in all steps; None for a cell in fp32."""
        if cell.precision == "fp32":
            return None
        half, exact = (self._file(reference_of(cell, precision), STEPS) for precision in (cell.precision, "fp32"))
        return _apart(str(half), str(exact))

    def _file(self, overrides: list[str], steps: int) -> Path:
        key = (*overrides, steps)
        if key not in self._made:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            path = self.folder / f"{len(self._made)}.pickle"
            path.write_bytes(pickle.dumps(list(recorded(load(overrides), steps))))
            torch.set_num_threads(threads)
            self._made[key] = path
        return self._made[key]


class Pool(KeptRanks):
    """Runs cells on ranks that stay: those of one world size at a time."""

    def __init__(self, references: References, collective_timeout: float = 240) -> None:
        super().__init__(collective_timeout=collective_timeout)
        self.references = references

    def run(
        self,
        cell: Cell,
        bug: str = "",
        timeout: float = 120,
        runner: str = "distributed.cells.compare:run_cell",
        steps: int = STEPS,
    ) -> Result:
        """The result of a cell. Raises what Ranks.run raises; the next cell then starts new ranks."""
        reference, apart = self.references.of(cell, steps)
        arguments = (load(cell.overrides()), reference, apart, bug, cell.has_twin, steps)
        return self.ranks(cell.world).run(runner, *arguments, timeout=timeout)[0]

    def check(self, cell: Cell, **options: Any) -> None:
        """Fails with what differs if the cell is not the same as one process."""
        result = self.run(cell, **options)
        same, words = judge(self.references, cell, result)
        assert same, "\n".join([words, *map(row, result.comparisons)])
