"""What the configurations of all models have in common."""

from dataclasses import dataclass


@dataclass
class ModelConfig:
    """The base of models' configurations, which Hydra needs to know; it has no keys."""
