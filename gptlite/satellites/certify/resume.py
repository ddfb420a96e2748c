"""Stage `resume`: a run of the largest reduced world is killed twice and goes on to the bit, then on other layouts."""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import read_manifest
from gptlite.checkpoint.store import step_folders, step_of
from gptlite.config.schema import Config
from gptlite.metrics.jsonl import read_rows
from gptlite.precision import Precision
from gptlite.satellites.certify.ranks import RankFailed, run, start
from gptlite.satellites.certify.reduction import DDP, INTERVAL, SINGLE, STEPS, ZERO3, ReducedRuns, compresses, legal
from gptlite.satellites.certify.rows import StageRow

TRAIN = "gptlite.satellites.certify.tasks:train"
# Of losses and gradient norms: those of parity in fp32, and about epsilon of bf16 in 16-bit precision.
LIMITS = {Precision.fp32: (1e-5, 1e-5)}
HALF_LIMITS = 2e-3, 2e-2
VALUES = 0.1  # of a learning rate, in fp32
LONGEST_SAVE = 0.03  # seconds from the beginning of a save within which the ranks are killed


@dataclass(frozen=True)
class Resumed:
    """Row of the stage, and the last checkpoints of the uninterrupted run and of one process, for the stage `state`."""

    row: StageRow
    whole: Path | None = None
    single: Path | None = None


def check_resume(reduction: ReducedRuns, folder: Path, seed: int, done: Callable[[], None]) -> Resumed:
    """Run the stage. The moments of death follow from `seed`. `done` is called after each life of a run."""
    config = reduction.of(reduction.worlds[0].parallelism)
    killed, whole = folder / "killed", folder / "whole"
    # Where an optimizer does not shard its state so far, two data ranks hold copies of it.
    second = ("zero3", ZERO3) if legal(reduction.of(ZERO3)) else ("ddp", DDP)
    layouts = dict([second, ("single", SINGLE)])
    try:
        deaths = _kill(config, killed, random.Random(seed), done)
        copies = {name: Path(shutil.copytree(killed, folder / name)) for name in layouts}
        for where in (killed, whole):
            _complete(config, folder, where)
            done()
        for name, layout in layouts.items():
            _complete(reduction.of(layout), folder, copies[name])
            done()
    except RankFailed as error:
        return Resumed(StageRow("resume", False, str(error)))
    apart = worst = 0.0
    problem = differing(_last(killed), _last(whole))
    problem = problem and f"after two kills on the same layout, {problem}"
    for name in layouts if not problem and not compresses(config) else ():
        problem, apart = _elsewhere(reduction.base.precision.dtype, copies[name], whole)
        worst = max(worst, apart)
        if problem:
            problem = f"resumed on {name}: {problem}"
            break
    words = f"{deaths}; on {' and '.join(layouts)} " + (f"loss {worst:.0e}" if not compresses(config) else "too")
    return Resumed(StageRow("resume", not problem, problem or words), _last(whole), _last(copies["single"]))


def _kill(config: Config, run_dir: Path, draw: random.Random, done: Callable[[], None]) -> str:
    """Train in `run_dir` until a rank dies before a step, go on until all die in a save, and return this in words.

    Raises RankFailed if the run fails by itself.
    """
    folder = run_dir.parent
    # By then, an asynchronous save is complete: the next one waits for it.
    step = draw.randrange(2 * INTERVAL + 1, STEPS - INTERVAL)
    size = config.parallelism.tensor * config.parallelism.pipeline * config.parallelism.context
    ranks = start(TRAIN, config, folder, str(run_dir), draw.randrange(size * (config.parallelism.data or 1)), step)
    ranks.wait_any()
    if all(each.exitcode != -9 for each in ranks.processes):
        ranks.wait()
    ranks.kill()
    done()
    first = step_of(step_folders(run_dir / "checkpoints")[0])
    ranks = start(TRAIN, config, folder, str(run_dir))
    ranks.wait_any(lambda: any((run_dir / "checkpoints").glob(".tmp-step-*")))
    time.sleep(draw.uniform(0, LONGEST_SAVE))
    ranks.kill()
    done()
    second = step_of(step_folders(run_dir / "checkpoints")[0])
    return f"killed before step {step} and in a save; to the bit from steps {first} and {second}"


def _elsewhere(precision: Precision, run_dir: Path, whole: Path) -> tuple[str, float]:
    """Return what of a run resumed on another layout is not as in the run `whole`, in words (empty if all is), and the
    relative difference of the losses."""
    limits, worst = LIMITS.get(precision, HALF_LIMITS), 0.0
    expected, curve = _curve(whole), _curve(run_dir)
    for step, (loss, norm, _) in expected.items():
        there = curve.get(step, (math.nan, math.nan, math.nan))
        apart = abs(there[0] - loss) / abs(loss), abs(there[1] - norm) / max(abs(norm), 1e-30)
        for what, error, limit in zip(("loss", "gradient norm"), apart, limits, strict=True):
            if not error <= limit:
                return f"step {step}: {what} is off by {error:.1e} (limit {limit:.1e})", apart[0]
        worst = max(worst, apart[0])
    if precision is Precision.fp32:
        rate = expected[STEPS][2]
        key, error = farthest(_last(run_dir), _last(whole))
        if not error <= VALUES * rate:
            return f"the value of {key} is off by {error / rate:.1e} of a learning rate (limit {VALUES})", worst
    return "", worst


def differing(one: Path, other: Path) -> str:
    """Return which tensors of two checkpoints are not the same to the bit, in words; an empty string if all are."""
    first, second = stored(one), stored(other)
    wrong = [key for key in second if key not in first or not _same(first[key], second[key])]
    wrong += [key for key in first if key not in second]
    return (
        f"{len(wrong)} of {len(second)} tensors differ from those of a run that nothing stopped: {wrong[0]}"
        if wrong
        else ""
    )


def farthest(one: Path, other: Path) -> tuple[str, float]:
    """Return the model's tensor whose elements of two checkpoints are the farthest apart, and the distance."""
    first, second = stored(one, "model."), stored(other, "model.")
    apart = {
        key: (first[key].double() - second[key].double()).abs().max().item() for key in second if second[key].numel()
    }
    return max(apart.items(), key=lambda each: each[1])


def stored(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose keys begin with `prefix`."""
    entries = read_manifest(folder).tensors
    into = {
        key: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for key, entry in entries.items()
        if key.startswith(prefix)
    }
    load_tensors(folder, into, strict=False, log=lambda _: None)
    return into


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def _complete(config: Config, folder: Path, where: Path) -> None:
    """Train to the last step. Raises RankFailed."""
    codes = run(TRAIN, config, folder, str(where))
    if any(codes):
        raise RankFailed(f"training ended with exit code {max(codes)}", "")


def _last(run_dir: Path) -> Path:
    return step_folders(run_dir / "checkpoints")[0]


def _curve(run_dir: Path) -> dict[int, tuple[float, float, float]]:
    """Return the loss, the gradient norm and the learning rate of each step."""
    rows: list[dict[str, Any]] = [row for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row]
    return {row["step"]: (row["loss"], row["grad_norm"], row["lr"]) for row in rows}
