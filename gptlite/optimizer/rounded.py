"""bf16 parameters without an fp32 copy: a step is computed in fp32, and rounded to bf16 stochastically.

bf16 keeps 8 bits, so a step below about 1/512 of a weight would be rounded away every time. Rounded up with the
probability of its distance from below, it is taken on average (Gupta et al. 2015, arXiv:1502.02551; Zamirai et al.
2020, arXiv:2010.06192).

The chance comes from Philox, keyed by the seed and a parameter's global name, and counts the step and an element's
place in the whole: any layout rounds alike, copies stay copies, and a resumed run goes on to the bit.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gptlite.ops.philox import WORD, philox
from gptlite.optimizer.base import PieceRule, PiecewiseStep
from gptlite.optimizer.state import materialized
from gptlite.parallelism.boxes import local_box
from gptlite.parallelism.zero import local_tensor

LANES = 8  # elements that one counter serves: its four words are eight draws of 16 bits
BLOCK = 2**18  # counters at a time: bounds the memory of drawing
LOW = 0xFFFF


class RoundedStep(PiecewiseStep):
    """What replaces the step of an optimizer whose parameters are bf16. Its gradients and state are fp32."""

    rounding: Rounding

    def take(self, options: dict[str, Any]) -> None:
        self.rounding.run(self, options)  # type: ignore[arg-type]


def round_steps(optimizer: Optimizer, seed: int) -> Optimizer:
    """The same optimizer, its steps computed in fp32 and rounded to its bf16 parameters. To be called before a step.

    Its rule must be elementwise. `set_step` says which step is next.
    """
    optimizer.rounding = Rounding(optimizer, seed)  # type: ignore[attr-defined]
    RoundedStep.put_on(optimizer)
    return optimizer


def set_step(optimizer: Optimizer, step: int) -> None:
    """Says which step of the run, from 0, the optimizer takes next: what rounding draws from."""
    if isinstance(optimizer, RoundedStep):
        optimizer.rounding.number = step


class Rounding:
    """The optimizer of fp32 copies, made of one parameter at a time, and what the rounding is drawn from."""

    def __init__(self, optimizer: Optimizer, seed: int) -> None:
        self.seed, self.number = seed, 0
        self._rule = PieceRule(optimizer)

    def run(self, optimizer: Optimizer, options: dict[str, Any]) -> None:
        """One step of all parameters that have a gradient."""
        for group in optimizer.param_groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                wide = local_tensor(parameter).detach().float()
                wide.grad = local_tensor(parameter.grad).float()
                state = {
                    key: local_tensor(value) if isinstance(value, Tensor) else value
                    for key, value in materialized(optimizer, parameter).items()
                }
                self._rule.step([group | {"params": [wide]}], {wide: state}, options)
                round_box_(parameter, wide, self.seed, self.number, name)


def round_box_(parameter: Tensor, values: Tensor, seed: int, step: int, name: str) -> None:
    """Writes this rank's part of the fp32 `values` of a parameter into it, each rounded as in the whole."""
    sizes, starts = local_box(parameter)
    target = local_tensor(parameter).detach()
    if not values.numel():
        return
    digest = hashlib.sha256(f"{seed}/{name}/rounding".encode()).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    rows, columns = (sizes[0], values[0].numel()) if len(sizes) > 1 else (1, values.numel())
    row, column = (starts[0], starts[1]) if len(sizes) > 1 else (0, starts[0])
    source, target = values.view(rows, columns), target.view(rows, columns)
    torch.autograd.graph.increment_version(parameter)
    first, lanes = column // LANES, -(-(column + columns) // LANES) - column // LANES
    rows_each, lanes_each = max(1, BLOCK // lanes), min(lanes, BLOCK)
    for top in range(0, rows, rows_each):
        for left in range(0, lanes, lanes_each):
            # Columns of this block that are this rank's: its first and last counter may serve others, too.
            begin = max(0, (first + left) * LANES - column)
            end = min(columns, (first + left + lanes_each) * LANES - column)
            block = source[top : top + rows_each, begin:end]
            skip = column + begin - (first + left) * LANES
            count = -(-(skip + end - begin) // LANES)
            draws = _draws(row + top, len(block), first + left, count, step, key, values.device)
            target[top : top + rows_each, begin:end] = rounded(block, draws[:, skip : skip + end - begin])


def rounded(values: Tensor, draws: Tensor) -> Tensor:
    """fp32 values as bf16, each the next one away from zero where its draw, 0 ... 65535, is among the last of as many
    as its 16 bits below bf16's say. inf and NaN stay what they are."""
    bits = values.contiguous().view(torch.int32)
    up = ((bits + draws) & ~LOW).view(torch.float32)
    return torch.where(values.isfinite(), up, values).to(torch.bfloat16)


def _draws(row: int, rows: int, lane: int, lanes: int, step: int, key: tuple[int, int], device: torch.device) -> Tensor:
    """Uniform numbers of 16 bits, int32 [rows, LANES * lanes], for these rows and counters of a parameter at a step."""
    lane_numbers = torch.arange(lane, lane + lanes, device=device)
    row_numbers = torch.arange(row, row + rows, device=device).unsqueeze(1)
    counter = (
        lane_numbers & WORD,
        row_numbers,
        torch.full((), step & WORD, device=device),
        (lane_numbers >> 32) + ((step >> 32) << 16),
    )
    words = torch.broadcast_tensors(*philox(counter, key))
    halves = [half for word in words for half in (word & LOW, word >> 16)]
    return torch.stack(halves, dim=-1).flatten(-2).to(torch.int32)
