"""Gradient noise scale, and AdaScale, which multiplies the learning rate by a gain that follows from it: a plug-in that
comes with gptlite. Does not import torch."""

from gptlite.config.plugins import CHECKS
from gptlite.config.trainer import NOISES
from gptlite.parallelism.config import REDUCTIONS
from gptlite.satellites.noise.checks import check_noise, wanted

BUILDER = f"{__name__}.build"
if BUILDER not in dict(NOISES):
    NOISES.append((BUILDER, wanted))
    REDUCTIONS.insert(0, (BUILDER, wanted))  # for sums that nothing else replaces
    CHECKS.append(check_noise)
