"""Sums of gradients with equal bits in every data-parallel layout: a plug-in that comes with gptlite. Does not import
torch."""

from gptlite.config.plugins import CHECKS
from gptlite.parallelism.config import REDUCTIONS
from gptlite.satellites.deterministic.check import check_deterministic, wanted

BUILDER = f"{__name__}.build"
if BUILDER not in dict(REDUCTIONS):
    REDUCTIONS.append((BUILDER, wanted))
    CHECKS.append(check_deterministic)
