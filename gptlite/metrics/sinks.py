"""Where metrics rows go. A row is a flat dict of the names in metrics.jsonl, the same in every sink."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gptlite.errors import ConfigError, did_you_mean
from gptlite.metrics.config import LoggerConfig, TensorboardConfig, WandbConfig
from gptlite.metrics.jsonl import JsonlSink, truncate_after
from gptlite.metrics.wandb_sink import WandbSink

WANDB_MODES = ("online", "offline", "disabled")


class Sink(Protocol):
    """Takes one row after the other. `step` is in every row; values are numbers, or None where nothing is known."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Records one row."""
        ...

    def rewind(self, step: int) -> None:
        """The run goes back to `step`: rows later than that give way to those to come."""
        ...

    def close(self, failed: bool = False) -> None:
        """Writes out what is buffered; `failed` marks the run as failed where a tracker shows that."""
        ...


class TensorboardSink:
    """Event files in `folder`. Events later than `start_step` from before a resume are marked as replaced."""

    def __init__(self, folder: Path, start_step: int = 0):
        self._folder = folder
        self._open(start_step)

    def write(self, row: Mapping[str, Any]) -> None:
        """One scalar a value, under its own name."""
        for key, value in row.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, global_step=row["step"])

    def rewind(self, step: int) -> None:
        """Begins a file that marks events later than `step` as replaced."""
        self._writer.close()
        self._open(step)

    def close(self, failed: bool = False) -> None:
        """Writes out what is buffered."""
        self._writer.close()

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)


def check(config: LoggerConfig) -> None:
    """Refuses, before anything is written, a logger that could not start.

    Raises:
        ConfigError: its package is not installed, or `logger.mode` is none of W&B's.
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
    """metrics.jsonl, always, and the sink that `config` asks for. To be called by the main rank alone.

    Args:
        resolved_config: plain containers, shown by W&B.
        wandb_id: of the run being resumed, else None.
        start_step: optimizer steps the loaded checkpoint had done; later rows in run_dir give way to the new ones.
        log: takes one-line notices.

    Raises:
        ConfigError: see `check`; or W&B refuses the run.
    """
    check(config)
    tracker: list[Sink] = []
    match config:
        case TensorboardConfig():
            tracker.append(TensorboardSink(run_dir / "tensorboard", start_step))
        case WandbConfig():
            tracker.append(WandbSink(config, run_dir, run_name, resolved_config, wandb_id, log))
    metrics = run_dir / "metrics.jsonl"
    truncate_after(metrics, start_step)
    return [JsonlSink(metrics), *tracker]


def wandb_id(sinks: Sequence[Sink]) -> str | None:
    """The id of the W&B run among the sinks, which a checkpoint keeps."""
    return next((sink.id for sink in sinks if isinstance(sink, WandbSink)), None)


def _require(package: str) -> None:
    spec = importlib.util.find_spec(package)
    # A folder of that name in the working directory (W&B makes one) is found as a namespace package, without origin.
    if spec is None or spec.origin is None:
        raise ConfigError(f"logger={package} needs the package {package}; pip install {package}")
