"""Sums of gradients that send fewer bytes than FSDP2's: a plug-in that comes with gptlite. Does not import torch."""

from gptlite.config.plugins import CHECKS
from gptlite.parallelism.config import REDUCTIONS
from gptlite.satellites.compressed.check import check_compression

BUILDER = f"{__name__}.build"
if BUILDER not in REDUCTIONS:
    REDUCTIONS.append(BUILDER)
    CHECKS.append(check_compression)
