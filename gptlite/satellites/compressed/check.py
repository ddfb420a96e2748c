"""Checks of `parallelism.compression`. Does not import torch."""

from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.parallelism.config import Compression
from gptlite.precision import SCALED, Reduce


def compresses(config: Config) -> bool:
    """Return True if a run compresses its gradients."""
    return config.parallelism.compression is not Compression.none


def check_compression(config: Config) -> None:
    """Raise ConfigError if another key rules out compressed gradients."""
    layout, precision = config.parallelism, config.precision
    if layout.compression is Compression.none:
        return
    key = f"parallelism.compression={layout.compression.value}"
    if layout.compression is Compression.powersgd and layout.zero and layout.dp_replicate == 1:
        raise ConfigError(
            f"{key} sums whole matrices on all data ranks, but parallelism.zero={layout.zero} sums a shard of them on "
            "each; use parallelism=ddp, parallelism.dp_replicate above 1, or parallelism.compression=int4"
        )
    if precision.dtype in SCALED:
        raise ConfigError(
            f"{key} with precision={precision.dtype.value}: gradients that overflow at a loss scale would spoil the "
            "errors kept for later steps; use precision=bf16 or fp32, or parallelism.compression=none"
        )
    if precision.reduce is Reduce.compute:
        raise ConfigError(
            f"{key} compresses gradients in fp32, which precision.reduce=compute would round first; use "
            "precision.reduce=fp32, or parallelism.compression=none"
        )
    if layout.expert > 1:
        raise ConfigError(
            f"{key} with parallelism.expert={layout.expert}: experts are not summed over all data ranks; use "
            "parallelism.expert=1, or parallelism.compression=none"
        )
