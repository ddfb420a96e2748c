"""Configuration of loggers other than the console and metrics.jsonl, which are always on."""

from dataclasses import dataclass


@dataclass
class LoggerConfig:
    """No logger besides the console and metrics.jsonl."""


@dataclass
class TensorboardConfig(LoggerConfig):
    """TensorBoard event files in <run.dir>/tensorboard."""


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases. Without an API key, the run is offline, after one warning."""

    project: str = "gptlite"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None  # online, offline or disabled; null: online if an API key is set
