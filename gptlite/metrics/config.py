"""Configuration of loggers other than the console and metrics.jsonl, which are always on."""

from dataclasses import dataclass


@dataclass
class LoggerConfig:
    """No logger except metrics.jsonl."""


@dataclass
class TensorboardConfig(LoggerConfig):
    """TensorBoard event files in <run.dir>/tensorboard."""


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases; offline, after one warning, if no API key is set."""

    project: str = "gptlite"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None  # online, offline or disabled; null: online if an API key is set
