"""Result of a run, as `pretrain` and `launch` return it. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from gptlite.documents import Count, Size, read_json

RESULT, CURVES = "result.json", "curves.png"  # in the run folder


class PipelineTimeline(TypedDict):
    """Data for a timeline of a pipeline, see `trainer.summary`."""

    ranks: Size
    schedule: str
    stages_per_rank: Size
    micro_batches: Size
    layers: list[Count]
    stage_flops: list[float]


class Values(TypedDict, total=False):
    """Content of result.json that readers rely on; it has further figures, which are numbers or null."""

    status: str
    checkpoint: str | None
    step: Count | None
    tokens: Count | None
    unit: str
    world_size: Size | None
    layout: str
    loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    val_bits_per_byte: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    step_seconds: float | None
    mfu: float | None
    wall_seconds: float | None
    memory_peak_bytes: float | None
    memory_ranks: list[dict[str, float | None]] | None
    comm_seconds: dict[str, float | None] | None
    pipeline: PipelineTimeline | None


def read_result(folder: Path) -> Values:
    """Return the content of the result.json of a run; {} if it is missing or damaged."""
    with suppress(OSError, ValueError):
        return read_json(folder / RESULT, Values)
    return {}


@dataclass(frozen=True)
class Picture:
    """Path of a PNG file, which a notebook shows as a picture."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True)
class Result:
    """Result of a run: how it ended, its metrics, and the absolute paths of its files.

    `outcome` is `done`, or begins with `stopped`, `diverged`, `spiked` or `failed`. `metrics` has the values of
    result.json: `loss`, `val_loss`, `step`, `tokens_per_second` and others.
    """

    folder: Path
    exit_code: int  # 0: done or stopped by a limit; 1: failed; 128 + n: stopped by signal n
    outcome: str
    metrics: dict[str, Any] = field(repr=False)
    checkpoint: Path | None  # the last checkpoint
    curves: Picture | None  # plots of loss, learning rate, gradient norm and speed

    @classmethod
    def of(cls, folder: Path, exit_code: int, values: Mapping[str, Any]) -> Result:
        """Return the result of the run in `folder`, given the content of its result.json."""
        folder = folder.absolute()
        metrics = {key: value for key, value in values.items() if key not in ("status", "checkpoint")}
        saved = values.get("checkpoint")
        return cls(
            folder,
            exit_code,
            outcome="stopped: signal" if exit_code > 128 else values.get("status", "done"),
            metrics=metrics,
            checkpoint=folder / "checkpoints" / Path(saved).name if saved else None,  # the folder may have moved
            curves=None,
        ).with_curves()

    def with_curves(self) -> Result:
        """Return this result with the plot of the run, if there is one by now."""
        path = self.folder / CURVES
        return replace(self, curves=Picture(path) if path.is_file() else None)

    @classmethod
    def read(cls, folder: Path, exit_code: int) -> Result:
        """Return the result of a run that other processes have written to `folder`."""
        return cls.of(folder, exit_code, read_result(folder))
