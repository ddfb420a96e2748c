"""Layout-independent initial weights: each element is drawn from (seed, global name, global offset).

The generator is Philox, with seed and name as key and the offset as counter. Any shard can therefore be drawn
independently, and has the same values as in the whole tensor, on CPUs and GPUs.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gptlite.models.base import Constant, Normal
from gptlite.models.model import Model
from gptlite.ops.philox import WORD, philox
from gptlite.parallelism.boxes import local_box, local_tensor
from gptlite.parallelism.in_files import changed

BLOCK = 2**20  # elements drawn at a time: bounds the memory of drawing


def init_weights(model: Model, part: nn.Module, seed: int) -> None:
    """Set the parameters of a part to their initial values: see BaseSpec.initial."""
    with torch.no_grad():
        for name, parameter in model.named_weights(part):
            init_weight_(model, name, parameter, seed)
            changed(local_tensor(parameter))


def init_weight_(model: Model, name: str, parameter: Tensor, seed: int) -> None:
    """Fill this rank's shard of one parameter: see init_weights."""
    match model.spec.initial(model.config, name, tuple(parameter.shape)):
        case Constant(value):
            parameter.fill_(value)
        case Normal(std):
            draw_box_(parameter, std, seed, name)


def draw_box_(parameter: Tensor, std: float, seed: int, name: str) -> None:
    """Fill this rank's shard of a parameter with N(0, std), the same values as in the whole parameter."""
    if not isinstance(parameter, DTensor):
        draw_normal_(parameter, std, seed, name)
        return
    _, offset = local_box(parameter)
    if (target := parameter.to_local()).numel():
        _draw_part_(target, tuple(parameter.shape), offset, partial(draw_normal_, std=std, seed=seed, name=name))


def _draw_part_(
    target: Tensor, whole: tuple[int, ...], at: tuple[int, ...], draw: Callable[..., None], offset: int = 0
) -> None:
    """Fill `target`, the part of a tensor of shape `whole` that starts at the indices `at`. `offset`: position of that
    tensor's first element in the parameter."""
    size = math.prod(whole[1:])
    if tuple(target.shape[1:]) == whole[1:]:
        draw(target, offset=offset + at[0] * size)
        return
    if target.ndim > 2:
        for index, each in enumerate(target):
            _draw_part_(each, whole[1:], at[1:], draw, offset + (at[0] + index) * size)
        return
    # This rank has only some columns. Counters run along whole rows, so draw whole rows and keep these columns.
    rows, columns = target.shape
    for start in range(0, rows, step := max(1, BLOCK // size)):
        block = target.new_empty(min(step, rows - start), size)
        draw(block, offset=offset + (at[0] + start) * size)
        target[start : start + step] = block[:, at[1] : at[1] + columns]


def draw_normal_(parameter: Tensor, std: float, seed: int, name: str, offset: int = 0) -> None:
    """Fill a contiguous fp32 parameter with N(0, std) from (seed, name), starting at element `offset` of the whole
    tensor.

    A shard is bitwise identical to its part of the whole tensor. Raises ValueError for a negative offset.
    """
    if offset < 0:
        raise ValueError(f"offset={offset} must not be negative")
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")  # Philox takes two 32-bit words
    start = offset
    for block in parameter.view(-1).split(BLOCK):
        block.copy_(_normal(start, len(block), key, parameter.device) * std)
        start += len(block)


def _normal(start: int, count: int, key: tuple[int, int], device: torch.device) -> Tensor:
    """Return float64 samples of N(0, 1) for elements `start` to `start + count - 1`: two Box-Muller pairs from each
    Philox counter.

    With double precision, devices whose logarithms differ in the last digit round to the same fp32 values.
    """
    counter = torch.arange(start // 4, (start + count + 3) // 4, device=device)  # each counter gives four values
    zero = torch.zeros_like(counter)
    bits = philox((counter & WORD, counter >> 32, zero, zero), key)
    # In (0, 1), so that the logarithm is finite.
    u0, u1, u2, u3 = ((word.double() + 0.5) / 2**32 for word in bits)
    pairs = []
    for radius, angle in ((u0, u1), (u2, u3)):
        r, a = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
        pairs += [r * a.cos(), r * a.sin()]
    return torch.stack(pairs, dim=1).flatten()[start % 4 : start % 4 + count]
