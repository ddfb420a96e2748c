"""Base class of the models' configurations."""

from dataclasses import dataclass


@dataclass
class ModelConfig:
    """Base of all model configurations, for Hydra's type checks; it has no keys."""
