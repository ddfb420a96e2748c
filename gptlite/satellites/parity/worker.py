"""Program of one rank of a comparison. The ranks run the first steps of a run on a layout, and rank 0 prints how
far each step is from the same step of a single process.

`python -m gptlite.satellites.parity.worker REFERENCE FOLDER STARTED LAUNCHER`, as gptlite/launch/elastic.py starts it.
REFERENCE is a folder that `save_reference` wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptlite.config.schema import Config
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.precision import resolve_precision
from gptlite.satellites.parity.compare import (
    NO_DIFFERENCE,
    Distances,
    StepComparison,
    Tolerances,
    compare,
    distances,
    fp32_limits,
    half_limits,
)
from gptlite.satellites.parity.record import StepRecord, recorded
from gptlite.satellites.parity.report import HEADER, row, verdict

APART = "apart"


def save_reference(folder: Path, steps: Iterator[StepRecord], exact: Iterator[StepRecord] | None = None) -> None:
    """Write the steps of a single process, one file per step. `exact` has the same steps in fp32; if given, also write
    the distances from them."""
    apart = None if exact is None else []
    for step in steps:
        torch.save(step, folder / str(step.step))
        if exact is not None and apart is not None:
            apart.append(distances(step, next(exact), rms=True))
    torch.save(apart, folder / APART)


def limits_of(reference: Path, config: Config, mesh: Mesh) -> Tolerances:
    """Return the limits for a run of `config`, given the folder of `save_reference`."""
    apart: list[Distances] | None = torch.load(reference / APART, weights_only=False)
    epsilon = torch.finfo(resolve_precision(config.precision, mesh.device).compute_dtype).eps
    if apart is not None:
        return half_limits(apart, epsilon)
    return NO_DIFFERENCE if config.parallelism.deterministic else fp32_limits()


def compared(reference: Path, config: Config, mesh: Mesh, limits: Tolerances) -> Iterator[StepComparison]:
    """Run as many steps as the reference has, on every rank. Yield the comparison of each on rank 0."""
    steps = sum(file.name != APART for file in reference.iterdir())
    for step in recorded(config, steps, mesh):
        if step is not None:
            # Memory-mapped, so that the reference's tensors are read from disk only when they are compared.
            expected = torch.load(reference / str(step.step), weights_only=False, mmap=True)
            yield compare(step, expected, limits)


def compare_run(reference: Path, config: Config, *_: Any) -> int:
    """Run as many steps as the reference has, on every rank. Rank 0 prints a row per step and the verdict.

    Returns the exit code: 0 if the runs agree within the limits, 1 if they differ.
    """
    mesh = build_mesh(config.parallelism)
    limits = limits_of(reference, config, mesh)
    comparisons: list[StepComparison] = []
    if mesh.is_main:
        print(HEADER)
    for each in compared(reference, config, mesh, limits):
        comparisons.append(each)
        print(row(each), flush=True)
    mesh.close()
    if not mesh.is_main:
        return 0
    same, message = verdict(comparisons, limits)
    print(message)
    return 0 if same else 1


if __name__ == "__main__":
    from gptlite.launch.worker import main

    main(sys.argv[2:], partial(compare_run, Path(sys.argv[1])))
