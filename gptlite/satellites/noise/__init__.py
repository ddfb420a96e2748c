"""Gradient noise scale, and AdaScale, which multiplies the learning rate by a gain that follows from it: a plug-in that
comes with gptlite. Does not import torch."""

from gptlite.config.trainer import CHECKS, NOISES
from gptlite.parallelism.config import REDUCTIONS
from gptlite.satellites.noise.checks import check_noise

BUILDER = f"{__name__}.build"
if BUILDER not in NOISES:
    NOISES.append(BUILDER)
    REDUCTIONS.append(BUILDER)
    CHECKS.append(check_noise)
