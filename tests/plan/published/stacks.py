"""Code bases whose kernels differ from those that the presets of `conf/cluster/` describe, and factors for them.

A stack's factors multiply a preset's values, or set keys that are 0 in a preset. They are fitted to the rows named in
`mpt.py` and `titan.py`, by least squares with the price that `fit.py` explains, and hold for every row of the stack.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from gptlite.plan.config import ClusterConfig
from plan.published import mpt, titan
from plan.published.fit import Constant, fit_point, moved
from plan.published.row import Row

PRODUCTS = "matmul_efficiency.bf16 matmul_efficiency.fp8"
_ATTENTION = "FlashAttention 1 in Triton, and 2, both written for A100s"
_SEPARATE = "separate ops: 1 to 3 times the bytes of fused kernels"
FACTORS = (
    Constant(PRODUCTS, 0.7, 1.1, "cuBLAS at the clocks of a whole step", True, mpt.STACK),
    Constant("attention_efficiency", 0.3, 1.1, _ATTENTION, True, mpt.STACK),
    Constant("memory_efficiency", 0.3, 1.0, _SEPARATE, True, mpt.STACK),
    Constant(PRODUCTS, 0.8, 1.1, "cuBLAS at the clocks of a whole step", True, "torchtitan"),
    Constant("attention_efficiency", 0.5, 1.1, _ATTENTION, True, "torchtitan"),
    Constant("memory_efficiency", 0.3, 1.0, _SEPARATE, True, titan.EAGER),
    Constant("memory_efficiency", 0.7, 1.3, "inductor's fused kernels: as ours", True, titan.COMPILED),
    Constant("straggle", 0.002, 0.03, "of n ranks whose steps differ by 1%, the slowest takes 1 to 3% longer"),
    Constant("inter.congestion", 0.02, 0.5, "bus bandwidth in nccl-tests: 1 to 4 times less on 64 nodes than on 2"),
)


def fitted_rows() -> list[Row]:
    """The rows to which the factors are fitted."""
    return [*mpt.fitted_rows(), *titan.fitted_rows()]


@cache
def places() -> tuple[float, ...]:
    """The places of the factors in their ranges."""
    return tuple(fit_point(fitted_rows(), FACTORS).tolist())


def fitted_cluster(row: Row) -> ClusterConfig:
    """The cluster of a row with its stack's factors."""
    return moved(row.sheet(), FACTORS, np.array(places()), row.stack)
