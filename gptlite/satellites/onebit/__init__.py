"""Optimizers that send momenta as one bit per element: a plug-in that comes with gptlite. Does not import torch."""

from gptlite.config.plugins import CHECKS
from gptlite.optimizer.registry import register_optimizer
from gptlite.parallelism.config import REDUCTIONS
from gptlite.satellites.onebit.configs import (
    OneBitAdamConfig,
    OneBitLambConfig,
    ZeroOneAdamConfig,
    check_onebit,
    exchanges_momenta,
)

for name, kind in {
    "onebit_adam": OneBitAdamConfig,
    "onebit_lamb": OneBitLambConfig,
    "zero_one_adam": ZeroOneAdamConfig,
}.items():
    register_optimizer(name, kind, preset=False)  # its preset is a file in conf/optimizer
BUILDER = f"{__name__}.reduction"
if BUILDER not in dict(REDUCTIONS):
    REDUCTIONS.append((BUILDER, exchanges_momenta))
    CHECKS.append(check_onebit)
