"""Where metrics go, besides the console and metrics.jsonl, which are always written."""

from dataclasses import dataclass


@dataclass
class LoggerConfig:
    """No logger but metrics.jsonl."""


@dataclass
class TensorboardConfig(LoggerConfig):
    """Event files in <run.dir>/tensorboard."""


@dataclass
class WandbConfig(LoggerConfig):
    """Weights & Biases; offline with one warning when there is no key."""

    project: str = "gptlite"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None  # online, offline or disabled; null: online when there is a key
