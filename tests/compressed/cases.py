"""Functions that tests run on ranks."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.compressed.sums import Counted, all_reduce, reduce_scatter

SUMS = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter}


@dataclass(frozen=True)
class Case:
    """Sums of random values; `zeros`: how many columns of the first block of every chunk are always zero."""

    codec: str
    sum: str
    rounds: int
    blocks: int = 3
    zeros: int = 0


def values(case: Case, world: int, step: int) -> NDArray[np.float64]:
    """What the workers add, [worker, chunk, blocks, width]: Gaussian, in which a part of the blocks is small."""
    generator = np.random.default_rng([step, world])
    shape = world, world, case.blocks, CODECS[case.codec].width
    drawn = generator.standard_normal(shape) * 10.0 ** generator.integers(-3, 2, (*shape[:3], 1))
    return (drawn * kept(case, world)).astype(np.float32).astype(np.float64)


def first_errors(case: Case, world: int) -> NDArray[np.float64]:
    """Errors that the workers start with, as after a checkpoint of another layout, [worker, chunk, blocks, width]."""
    return values(case, world, case.rounds) / 8


def kept(case: Case, world: int) -> NDArray[np.bool_]:
    """The mask, [chunk, blocks, width]."""
    mask = np.ones((world, case.blocks, CODECS[case.codec].width), bool)
    mask[:, 0, : case.zeros] = False
    return mask


def run(case: Case) -> tuple[NDArray, NDArray, list[int]]:
    """Results [round, ...] and last errors of this rank, and the bytes it sent in each round."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group, codec, mask = dist.group.WORLD, CODECS[case.codec], kept(case, world)
    assert group is not None
    counted, results, sent = Counted(), [], []
    errors = torch.from_numpy(first_errors(case, world)[rank]).float()
    for step in range(case.rounds):
        x = torch.from_numpy(values(case, world, step)[rank]).float()
        tensor_mask = torch.from_numpy(mask) if case.zeros else None
        result = SUMS[case.sum](x, errors, codec, group, tensor_mask, counted)
        results.append(result.numpy().copy())
        sent.append(counted.sent - sum(sent))
    return np.stack(results), errors.numpy(), sent
