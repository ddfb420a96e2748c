"""Bytes of an optimizer's state on a rank, on its device or in the buffers that lead to its file."""

from __future__ import annotations

from gptlite.optimizer.config import (
    BLOCK_8BIT,
    AdafactorConfig,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    SGDConfig,
    in_8_bits,
)
from gptlite.parallelism.config import Offload
from gptlite.plan.offload import buffers_bytes
from gptlite.plan.parameters import Parameter, Stage
from gptlite.plan.workload import MASTER, Workload

CODES = 256  # numbers that 8 bits stand for, in a table for each of the two moments


def moments_bytes(work: Workload, held: list[Stage]) -> int:
    """All in fp32, a count of steps too, which each parameter has but for Lion, SGD and Muon's matrices."""
    shards = work.layout.size("dp_shard")
    parameters = [parameter for stage in held for parameter in stage.parameters()]
    elements = sum(stage.sharded(shards) for stage in held)
    if work.parallelism.offload is Offload.nvme:
        counts = MASTER * len(parameters) * isinstance(work.optimizer, AdamWConfig | AdamConfig)
        return buffers_bytes(work, parameters) + counts
    match work.optimizer:
        case SGDConfig(momentum=momentum):
            return MASTER * elements if momentum else 0
        case LionConfig():
            return MASTER * elements
        case AdamW8bitConfig():
            return sum(state_in_8_bits(parameter.shard(shards)) for parameter in parameters) + 2 * MASTER * CODES
        case MuonConfig():
            matrices = [each for stage in held for each in stage.block * stage.layers if each.width > 1]
            alone = sum(matrix.shard(shards) for matrix in matrices)
            return MASTER * (2 * elements - alone + len(parameters) - len(matrices))
        case AdafactorConfig():
            return MASTER * sum(1 + _factors(parameter, shards) for parameter in parameters)
    return MASTER * (2 * elements + len(parameters))  # Adam's two, and LAMB's


def state_in_8_bits(elements: int) -> int:
    """Two moments, a byte an element and a scale a block, or in fp32 where they are; and a count of steps."""
    moment = elements + MASTER * elements // BLOCK_8BIT if in_8_bits(elements) else MASTER * elements
    return 2 * moment + MASTER


def _factors(parameter: Parameter, shards: int) -> int:
    """A matrix has a mean for each row and for each column, a vector (a column of rows) for each element."""
    rows = parameter.shard(shards) // parameter.width
    return rows + parameter.width if parameter.width > 1 else rows
