"""Sums of gradients that send fewer bytes than FSDP2's: a plug-in that comes with gptlite. Does not import torch."""

from gptlite.config.plugins import CHECKS
from gptlite.parallelism.config import REDUCTIONS
from gptlite.satellites.compressed.check import check_compression, compresses

BUILDER = f"{__name__}.build"
if BUILDER not in dict(REDUCTIONS):
    REDUCTIONS.append((BUILDER, compresses))
    CHECKS.append(check_compression)
