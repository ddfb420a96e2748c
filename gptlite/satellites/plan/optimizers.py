"""Cost of optimizers: the bytes of their state, the bytes that an update moves, and its products.

A plug-in's optimizer has the defaults below, unless its configuration class defines `update_bytes`, `state_bytes` or
`products`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from gptlite.optimizer.config import MuonConfig, OptimizerConfig, SGDConfig
from gptlite.satellites.optimizers.configs import AdafactorConfig, AdamW8bitConfig, LambConfig, LionConfig
from gptlite.satellites.optimizers.torchao import BLOCK_8BIT, in_8_bits
from gptlite.satellites.plan.workload import MASTER

CODES_8BIT = 256  # entries in the lookup table of 8-bit codes; each of the two moments has its own table
ADAM_BYTES = 40  # moved per element by clipping and Adam in one kernel
UPDATE_BYTES = {
    SGDConfig: 24,
    LambConfig: 128,
    LionConfig: 64,
    AdamW8bitConfig: 28,
    MuonConfig: 84,  # without its products
    AdafactorConfig: 88,
}


class Shard(NamedTuple):
    """Shards of `count` parameters on one rank, each of the same `shape`.

    `in_block`: True if the parameters belong to a block.
    """

    shape: tuple[int, ...]
    in_block: bool
    count: int

    @property
    def elements(self) -> int:
        """Number of elements of one shard."""
        return math.prod(self.shape)


def update_bytes(config: OptimizerConfig) -> int:
    """Return the bytes per parameter element that clipping and the update read and write."""
    return getattr(config, "update_bytes", UPDATE_BYTES.get(type(config), ADAM_BYTES))


def products(config: OptimizerConfig, rows: int, columns: int) -> list[tuple[int, int, int]]:
    """Return the GEMMs [m, k] x [k, n], as (m, k, n), of the update of one whole matrix in a block: Muon's are those of
    the Newton-Schulz iteration."""
    if own := getattr(config, "products", None):
        return own(rows, columns)
    if not isinstance(config, MuonConfig):
        return []
    low, high = sorted((rows, columns))
    return [(low, high, low), (low, low, low), (low, low, high)] * config.newton_schulz_steps


def state_bytes(config: OptimizerConfig, shards: Sequence[Shard]) -> int:
    """Return the size in bytes of a rank's state."""
    if own := getattr(config, "state_bytes", None):
        return own(shards)
    match config:
        case AdamW8bitConfig():  # and the lookup tables of the codes
            return sum(state_in_8_bits(each.elements) * each.count for each in shards) + 2 * MASTER * CODES_8BIT
        case MuonConfig():  # one moment for a matrix in a block, two moments and a step count for others
            matrices = [each for each in shards if each.in_block and len(each.shape) in (2, 3)]  # 3: of experts
            others = [each for each in shards if each not in matrices]
            alone = MASTER * sum(each.elements * each.count for each in matrices)
            return alone + MASTER * sum((2 * each.elements + 1) * each.count for each in others)
        case AdafactorConfig():
            return MASTER * sum((1 + _means(each.shape)) * each.count for each in shards)
    elements = sum(each.elements * each.count for each in shards)
    return MASTER * (config.state_elements() * elements + config.counts * sum(each.count for each in shards))


def state_in_8_bits(elements: int) -> int:
    """Return the bytes of a tensor's two moments and step count. 8-bit moments have a byte per element and a scale per
    block."""
    moment = elements + MASTER * elements // BLOCK_8BIT if in_8_bits(elements) else MASTER * elements
    return 2 * moment + MASTER


def _means(shape: tuple[int, ...]) -> int:
    """Return the number of Adafactor's means: one per row and column of each matrix, or per element of a vector."""
    if len(shape) < 2:
        return math.prod(shape)
    *stacked, rows, columns = shape
    return math.prod(stacked) * (rows + columns)
