"""What ops take inside themselves for a moment, which the dispatcher does not see: our kernels' workspaces."""

from __future__ import annotations

from math import prod
from typing import Any

ROWS = 256  # at most so many partial sums of each of three columns: gptlite_rows_workspace of kernels/cpu/workspace.cpp
# By our ops with sums over rows: which argument has the rows.
ROWS_OF = {"layer_norm_backward": 1, "residual_norm_backward": 2, "bias_gelu_backward": 1}


def moment_bytes(func: Any, args: Any) -> int:
    """Bytes that a dispatched op takes besides its results while it runs."""
    if func.namespace != "gptlite" or func._opname not in ROWS_OF:
        return 0
    *leading, width = args[ROWS_OF[func._opname]].shape
    return 4 * 3 * min(prod(leading), ROWS) * width
