"""bf16 parameters without an fp32 copy. A step is computed in fp32 and rounded to bf16 stochastically.

bf16 has 8 bits of precision, so rounding to nearest would always drop a step below about 1/512 of a weight. Stochastic
rounding rounds up with a probability proportional to the distance from the lower neighbour, so that the step is correct
on average (Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192).

The random numbers come from Philox. The key is the seed and a parameter's global name; the counter is the step and an
element's position in the whole parameter. The rounding is therefore the same for any layout and for all replicas, and a
resumed run is bit-exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gptlite.ops.philox import WORD, philox
from gptlite.optimizer.base import PiecewiseOptimizer
from gptlite.optimizer.state import materialized
from gptlite.parallelism.boxes import local_box, local_tensor

LANES = 8  # elements per counter: its four 32-bit words give eight 16-bit draws
BLOCK = 2**18  # counters per block: bounds the memory for random numbers
LOW = 0xFFFF


class RoundedOptimizer(PiecewiseOptimizer):
    """Optimizer of bf16 parameters. A rule steps an fp32 copy of each, which is rounded stochastically.

    Gradients and state are fp32. `next_step` is the number of the next step, counted from 0.
    """

    def __init__(self, rule: Optimizer, seed: int) -> None:
        super().__init__(rule)
        self.seed, self.next_step = seed, 0

    def update(self, options: dict[str, Any]) -> None:
        """Take one step of all parameters that have a gradient."""
        for group in self.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                wide = local_tensor(parameter).detach().float()
                wide.grad = local_tensor(parameter.grad).float()
                state = {
                    key: local_tensor(value) if isinstance(value, Tensor) else value
                    for key, value in materialized(self, parameter).items()
                }
                self.step_pieces([group | {"params": [wide]}], {wide: state}, options)
                round_box_(parameter, wide, self.seed, self.next_step, name)


def set_step(optimizer: Optimizer, step: int) -> None:
    """Set the number of the optimizer's next step, counted from 0, if its random numbers depend on it."""
    if isinstance(optimizer, RoundedOptimizer):
        optimizer.next_step = step


def round_box_(parameter: Tensor, values: Tensor, seed: int, step: int, name: str) -> None:
    """Round the fp32 `values` of this rank's shard stochastically to bf16 and store them in `parameter`.

    The draws depend on an element's position in the whole parameter, so the result does not depend on the layout.
    """
    sizes, starts = local_box(parameter)
    target = local_tensor(parameter).detach()
    if not values.numel():
        return
    digest = hashlib.sha256(f"{seed}/{name}/rounding".encode()).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    whole = parameter.shape
    if len(sizes) < 2:  # one row
        sizes, starts, whole = (1, *sizes), (0, *starts), (1, *whole)
    columns = _positions(whole[1:], sizes[1:], starts[1:])
    source, target = values.view(sizes[0], len(columns)), target.view(sizes[0], len(columns))
    torch.autograd.graph.increment_version(parameter)  # autograd detects stale saved tensors by the version
    columns_each = min(len(columns), BLOCK * LANES)
    rows_each = max(1, BLOCK * LANES // columns_each)
    for left in range(0, len(columns), columns_each):
        right = left + columns_each
        lanes, chosen = _lanes(columns[left:right], values.device)
        for top in range(0, sizes[0], rows_each):
            block = source[top : top + rows_each, left:right]
            draws = _draws(starts[0] + top, len(block), lanes, step, key)
            target[top : top + rows_each, left:right] = rounded(block, draws[:, chosen])


# With NumPy, as the planner runs optimizers on tensors without values.
def _positions(whole: Sequence[int], sizes: Sequence[int], starts: Sequence[int]) -> np.ndarray:
    """Return the positions of a box's elements in a flat tensor of shape `whole`, in order: int64[N]."""
    found = np.zeros(1, dtype=np.int64)
    for length, size, start in zip(whole, sizes, starts, strict=True):
        found = (found[:, None] * length + np.arange(start, start + size)).reshape(-1)
    return found


def _lanes(columns: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor | slice]:
    """Return the counters that some columns need, and the indices of these columns in the counters' draws."""
    first, last = int(columns[0]), int(columns[-1])
    if last - first == len(columns) - 1:  # consecutive, as in any matrix: faster
        start = first % LANES
        return torch.arange(first // LANES, last // LANES + 1, device=device), slice(start, start + len(columns))
    lanes, lane = np.unique(columns // LANES, return_inverse=True)
    return torch.from_numpy(lanes).to(device), torch.from_numpy(lane * LANES + columns % LANES).to(device)


def rounded(values: Tensor, draws: Tensor) -> Tensor:
    """Return fp32 values rounded to bf16 by draws from 0 to 65535.

    A value is rounded away from zero if the sum of its low 16 bits and its draw carries into bf16's bits. inf and NaN
    are kept.
    """
    bits = values.contiguous().view(torch.int32)
    up = ((bits + draws) & ~LOW).view(torch.float32)  # the sign is a separate bit, so negative values work too
    return torch.where(values.isfinite(), up, values).to(torch.bfloat16)


def _draws(row: int, rows: int, lanes: Tensor, step: int, key: tuple[int, int]) -> Tensor:
    """Return uniform 16-bit numbers, int32 [rows, LANES * len(lanes)], for rows and counters of a parameter at a
    step."""
    row_numbers = torch.arange(row, row + rows, device=lanes.device).unsqueeze(1)
    counter = (
        lanes & WORD,
        row_numbers,
        torch.full((), step & WORD, device=lanes.device),
        (lanes >> 32) + ((step >> 32) << 16),
    )
    words = torch.broadcast_tensors(*philox(counter, key))
    halves = [half for word in words for half in (word & LOW, word >> 16)]
    return torch.stack(halves, dim=-1).flatten(-2).to(torch.int32)
