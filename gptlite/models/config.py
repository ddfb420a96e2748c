"""Base class of the models' configurations."""

from dataclasses import dataclass


@dataclass
class ModelConfig:
    """Base class of all model configurations, for Hydra's type checks. It has no keys."""
