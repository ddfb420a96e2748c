"""Stage `resume`: a run of the largest reduced world is killed twice and goes on to the bit, then on other layouts."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
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
from gptlite.parallelism.config import Compression
from gptlite.precision import Precision
from gptlite.satellites.certify.ranks import RankFailed, Ranks, run, start
from gptlite.satellites.certify.reduction import INTERVAL, SINGLE, STEPS, ZERO3, Reduction, lossy
from gptlite.satellites.certify.rows import Row

TRAIN = "gptlite.satellites.certify.tasks:train"
# Of losses and gradient norms: those of parity in fp32, and about epsilon of bf16 in 16-bit precision.
LIMITS = {Precision.fp32: (1e-5, 1e-5)}
HALF_LIMITS = 2e-3, 2e-2
VALUES = 0.1  # of a learning rate, in fp32


@dataclass(frozen=True)
class Resumed:
    """Row of the stage, and the last checkpoints of the uninterrupted run and of one process, for the stage `state`."""

    row: Row
    whole: Path | None = None
    single: Path | None = None


def check_resume(reduction: Reduction, folder: Path, seed: int, done: Callable[[], None]) -> Resumed:
    """Run the stage. The moments of death follow from `seed`. `done` is called after each life of a run."""
    world, draw = reduction.worlds[0], random.Random(seed)
    config = reduction.of(world.parallelism)
    killed = folder / "killed"
    try:
        step, rank = draw.randrange(INTERVAL + 1, STEPS - INTERVAL), draw.randrange(world.ranks)
        ranks = start(TRAIN, config, folder, str(killed), rank, step)
        ranks.wait_any()
        ranks.kill()
        done()
        _require_killed(ranks)
        ranks = start(TRAIN, config, folder, str(killed))
        ranks.wait_any(lambda: any((killed / "checkpoints").glob(".tmp-step-*")))
        time.sleep(draw.uniform(0, 0.03))
        ranks.kill()
        done()
        from_step = step_of(step_folders(killed / "checkpoints")[0])
        copies = {name: Path(shutil.copytree(killed, folder / name)) for name in ("zero3", "single")}
        whole = folder / "whole"
        for where, at in ((killed, config), (whole, config)):
            _complete(at, folder, where)
            done()
        problem = differing(_last(killed), _last(whole))
        places = {"zero3": ZERO3, "single": SINGLE}
        for name, layout in places.items():
            _complete(reduction.of(layout), folder, copies[name])
            done()
    except (RankFailed, IndexError) as error:
        words = str(error) if isinstance(error, RankFailed) else "no checkpoint was left after the first kill"
        return Resumed(Row("resume", False, words))
    if problem:
        return Resumed(
            Row("resume", False, f"after two kills on the same layout, {problem}"),
            _last(whole),
            _last(copies["single"]),
        )
    apart = [] if _compresses(config) else list(_apart(reduction, copies, whole))
    if wrong := next((words for passed, words in apart if not passed), None):
        return Resumed(Row("resume", False, wrong), _last(whole), _last(copies["single"]))
    where = f"killed before step {step} and in a save, to the bit from step {from_step}; on zero3 and single "
    words = where + ("loads" if not apart else f"loss within {max(float(words) for _, words in apart):.0e}")
    return Resumed(Row("resume", True, words), _last(whole), _last(copies["single"]))


def _apart(reduction: Reduction, copies: dict[str, Path], whole: Path) -> Iterator[tuple[bool, str]]:
    """Yield, for each other layout, True and the relative difference of losses, or False and what differs."""
    precision = reduction.base.precision.dtype
    loss_limit, norm_limit = LIMITS.get(precision, HALF_LIMITS)
    expected = _curve(whole)
    for name, folder in copies.items():
        found = _curve(folder)
        worst = 0.0
        for step, (loss, norm, _) in expected.items():
            there = found.get(step, (float("nan"), float("nan"), 0.0))
            apart = abs(there[0] - loss) / abs(loss), abs(there[1] - norm) / max(abs(norm), 1e-30)
            for what, error, limit in zip(("loss", "gradient norm"), apart, (loss_limit, norm_limit), strict=True):
                if not error <= limit:
                    yield False, f"resumed on {name}: step {step}: {what} is off by {error:.1e} (limit {limit:.1e})"
                    return
            worst = max(worst, apart[0])
        if precision is Precision.fp32:
            rate = expected[STEPS][2]
            key, error = farthest(_last(folder), _last(whole))
            if not error <= VALUES * rate:
                words = f"value of {key} is off by {error / rate:.1e} of a learning rate (limit {VALUES})"
                yield False, f"resumed on {name}: {words}"
                return
        yield True, f"{worst}"


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


def _require_killed(ranks: Ranks) -> None:
    """Raise RankFailed if the run failed by itself before its death."""
    if any(each.exitcode == 1 for each in ranks.processes) and not any(each.exitcode == -9 for each in ranks.processes):
        ranks.wait()


def _compresses(config: Config) -> bool:
    layout = config.parallelism
    return layout.compression is not Compression.none or lossy(layout)


def _last(run_dir: Path) -> Path:
    return step_folders(run_dir / "checkpoints")[0]


def _curve(run_dir: Path) -> dict[int, tuple[float, float, float]]:
    """Return the loss, the gradient norm and the learning rate of each step."""
    rows: list[dict[str, Any]] = [row for row in read_rows(run_dir / "metrics.jsonl") if "loss" in row]
    return {row["step"]: (row["loss"], row["grad_norm"], row["lr"]) for row in rows}
