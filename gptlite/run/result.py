"""Result of a run, as `pretrain` and `launch` return it. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULT, CURVES, EXPERTS = "result.json", "curves.png", "experts.png"  # in the run folder


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
        folder, curves = folder.absolute(), folder.absolute() / CURVES
        metrics = {key: value for key, value in values.items() if key not in ("status", "checkpoint")}
        saved = values.get("checkpoint")
        return cls(
            folder,
            exit_code,
            outcome="stopped: signal" if exit_code > 128 else values.get("status", "done"),
            metrics=metrics,
            checkpoint=folder / "checkpoints" / Path(saved).name if saved else None,  # the folder may have moved
            curves=Picture(curves) if curves.is_file() else None,
        )

    @classmethod
    def read(cls, folder: Path, exit_code: int) -> Result:
        """Return the result of a run that other processes have written to `folder`."""
        values: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            values = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return cls.of(folder, exit_code, values)
