"""Sinks for metrics rows. A row is a dict with the keys of metrics.jsonl, the same in every sink."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gptlite.errors import ConfigError, did_you_mean
from gptlite.metrics.config import LoggerConfig, TensorboardConfig, WandbConfig
from gptlite.metrics.jsonl import JsonlSink, truncate_after

WANDB_MODES = ("online", "offline", "disabled")


class Sink(Protocol):
    """Destination of metrics rows. `step` is in every row. Other values are numbers, lists, or None if unknown."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Record one row."""
        ...

    def rewind(self, step: int) -> None:
        """Go back to `step`: discard or mark later rows, since training repeats those steps."""
        ...

    def close(self, failed: bool = False) -> None:
        """Flush buffered rows; `failed` marks the run as failed in trackers that show it."""
        ...


class TensorboardSink:
    """TensorBoard event files in `folder`. Events already there for steps after `start_step` are marked as replaced."""

    def __init__(self, folder: Path, start_step: int = 0):
        self._folder = folder
        self._open(start_step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write each number as a scalar named by its key. Lists are left out."""
        for key, value in row.items():
            if key != "step" and value is not None and not isinstance(value, list):
                self._writer.add_scalar(key, value, global_step=row["step"])

    def rewind(self, step: int) -> None:
        """Start a new file that marks events of steps after `step` as replaced."""
        self._writer.close()
        self._open(step)

    def close(self, failed: bool = False) -> None:
        """Flush buffered events."""
        self._writer.close()

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)


def check_logger(config: LoggerConfig) -> None:
    """Check, before anything is written, that the logger can start.

    Raises:
        ConfigError: its package is not installed, or `logger.mode` is not one of W&B's.
    """
    match config:
        case TensorboardConfig():
            _require("tensorboard")
        case WandbConfig():
            _require("wandb")
            if config.mode is not None and config.mode not in WANDB_MODES:
                fix = did_you_mean(config.mode, WANDB_MODES) or f"; choose one of {', '.join(WANDB_MODES)} or null"
                raise ConfigError(f"logger.mode={config.mode} is unknown{fix}")


def build_sinks(
    config: LoggerConfig,
    run_dir: Path,
    run_name: str,
    resolved_config: dict[str, Any],
    wandb_id: str | None = None,
    start_step: int = 0,
    log: Callable[[str], None] = print,
) -> list[Sink]:
    """Open metrics.jsonl and the sink selected by `config`. Call on the main rank only.

    Args:
        resolved_config: plain containers, stored by W&B.
        wandb_id: ID of the W&B run to resume, or None.
        start_step: step of the loaded checkpoint; later rows in run_dir are moved aside or marked as replaced.
        log: called with one-line notices.

    Raises:
        ConfigError: see `check_logger`; or W&B cannot start the run.
    """
    check_logger(config)
    tracker: list[Sink] = []
    match config:
        case TensorboardConfig():
            tracker.append(TensorboardSink(run_dir / "tensorboard", start_step))
        case WandbConfig():
            from gptlite.metrics.wandb_sink import WandbSink

            tracker.append(WandbSink(config, run_dir, run_name, resolved_config, wandb_id, log))
    metrics = run_dir / "metrics.jsonl"
    truncate_after(metrics, start_step)
    return [JsonlSink(metrics), *tracker]  # metrics.jsonl first, so that a tracker's error does not lose the row


def wandb_id(sinks: Sequence[Sink]) -> str | None:
    """Return the ID of the W&B run, which checkpoints store; None without a W&B sink."""
    return next(filter(None, (getattr(sink, "id", None) for sink in sinks)), None)


def _require(package: str) -> None:
    spec = importlib.util.find_spec(package)  # instead of an import, which may take seconds
    # A folder of that name in the working directory (W&B makes one) is found as a namespace package, without origin.
    if spec is None or spec.origin is None:
        raise ConfigError(f"logger={package} needs the package {package}; pip install {package}")
