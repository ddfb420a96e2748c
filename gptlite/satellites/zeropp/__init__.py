"""ZeRO++ (Wang et al. 2023, arXiv:2306.10209): a plug-in that comes with gptlite. Does not import torch."""

from gptlite.config.plugins import CHECKS
from gptlite.parallelism.config import REDUCTIONS
from gptlite.satellites.zeropp.check import check_zeropp, wanted

BUILDER = f"{__name__}.build"
if BUILDER not in dict(REDUCTIONS):
    REDUCTIONS.append((BUILDER, wanted))
    CHECKS.append(check_zeropp)
