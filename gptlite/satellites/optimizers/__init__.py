"""Optimizers that no preset of a model names: a plug-in that comes with gptlite. Does not import torch."""

from gptlite.optimizer.registry import register_optimizer
from gptlite.satellites.optimizers.configs import (
    AdafactorConfig,
    AdamW8bitConfig,
    ApexAdamConfig,
    ApexLambConfig,
    LambConfig,
    LionConfig,
)

for name, kind in {
    "adafactor": AdafactorConfig,
    "adamw_8bit": AdamW8bitConfig,
    "apex_adam": ApexAdamConfig,
    "apex_lamb": ApexLambConfig,
    "lamb": LambConfig,
    "lion": LionConfig,
}.items():
    register_optimizer(name, kind, preset=False)  # its preset is a file in conf/optimizer
