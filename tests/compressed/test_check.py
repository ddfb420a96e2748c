"""Refusals of parallelism.compression."""

import pytest

from gptlite.commands.parity import run as parity
from gptlite.config import load
from gptlite.errors import ConfigError

REFUSED = {
    "parallelism.compression=int8 precision=fp16": "parallelism.compression=int8 with precision=fp16: gradients that "
    "overflow at a loss scale would spoil the errors kept for later steps; use precision=bf16 or fp32, or "
    "parallelism.compression=none",
    "parallelism.compression=bf16 precision=bf16 precision.reduce=compute": "parallelism.compression=bf16 compresses "
    "gradients in fp32, which precision.reduce=compute would round first; use precision.reduce=fp32, or "
    "parallelism.compression=none",
    "parallelism.compression=int4 model=moe-lite parallelism.expert=2": "parallelism.compression=int4 with "
    "parallelism.expert=2: experts are not summed over all data ranks; use parallelism.expert=1, or "
    "parallelism.compression=none",
    "parallelism.compression=int7": "parallelism.compression: Invalid value 'int7', expected one of [none, bf16, int8, "
    "int4, powersgd]",
    "parallelism.compression=powersgd parallelism.zero=2": "parallelism.compression=powersgd sums whole matrices on "
    "all data ranks, but parallelism.zero=2 sums a shard of them on each; use parallelism=ddp, "
    "parallelism.dp_replicate above 1, or parallelism.compression=int4",
    "parallelism.compression=powersgd parallelism.compression_rank=0": "parallelism.compression_rank=0 must be at "
    "least 1",
    "parallelism=zero3 parallelism.zeropp.gradients=powersgd": "parallelism.zeropp.gradients=powersgd: powersgd is no "
    "codec of single values; use int8 or int4",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_be_compressed_is_refused(overrides: str):
    with pytest.raises(ConfigError) as refused:
        load(["data=synthetic", "run.name=x", "parallelism.data=2", *overrides.split()])
    assert str(refused.value) == REFUSED[overrides]


def test_parity_is_of_dense_sums():
    with pytest.raises(ConfigError) as refused:
        parity(["parallelism=ddp", "parallelism.compression=bf16"])
    assert str(refused.value) == (
        "parallelism.compression=bf16 rounds gradients, and parity is up to rounding in fp32; use "
        "parallelism.compression=none"
    )


def test_the_rest_is_not():
    for stage in range(4):
        load(["data=synthetic", "run.name=x", f"parallelism=zero{stage}" if stage else "parallelism=ddp",
              "parallelism.compression=int8", "precision=bf16"])  # fmt: skip
