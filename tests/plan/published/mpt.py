"""MosaicML's MPT on A100s and H100s: llm-foundry's benchmarking README, read on 2026-11-28, in mpt.csv.

PyTorch's first FSDP with flat parameters, without compilation, FlashAttention, AdamW of separate torch ops, no biases,
tied embeddings, ALiBi (modelled as learned positions). In its `bf16` runs, gradients are summed in 16 bits; in its
`amp_fp8` runs, linear layers are Transformer Engine's. Its A100 nodes have 1,600 Gbit/s of network for 8 GPUs.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from gptlite.models.gpt.config import GPTConfig
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan.workload import Workload
from plan.published.row import FLASH_2_ON_H100, TOKENS, Row

STACK = "llm-foundry"
SHAPES = {  # layers, heads, width
    "125m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "760m": (24, 12, 1536),
    "1b": (24, 16, 2048),
    "3b": (32, 20, 2560),
    "7b": (32, 32, 4096),
    "13b": (40, 40, 5120),
    "30b": (48, 56, 7168),
    "70b": (80, 64, 8192),
}
CLUSTERS = {"h100-80gb": "dgx-h100", "a100-80gb": "a100-80gb", "a100-40gb": "a100-40gb"}
ON_H100 = FLASH_2_ON_H100 | {"quantised_bytes": 4}  # Transformer Engine scales by the largest values of earlier steps
# The rows to which constants may be fitted: model, GPUs, device, length, micro-batch, accumulation, precision. They
# were chosen before constants were fitted to any; all others are kept to check the fit.
FITTED = """
1b    8 h100-80gb 2048 14  1 amp_bf16
1b  512 h100-80gb 2048 12  1 amp_bf16
3b   16 h100-80gb 2048 10  3 amp_bf16
7b    8 h100-80gb 2048  6  1 amp_bf16
7b    8 h100-80gb 8192  8  2 amp_bf16
13b 128 h100-80gb 2048 16  1 amp_bf16
30b   8 h100-80gb 2048  3 21 amp_bf16
70b 512 h100-80gb 2048  8  1 amp_bf16
70b  64 a100-80gb 2048  8  4 bf16
7b    8 a100-80gb 2048  6  2 amp_bf16
1b    8 a100-80gb 8192  3  4 amp_bf16
"""


@cache
def mpt_rows() -> tuple[Row, ...]:
    """Every row of the README."""
    with (Path(__file__).parent / "mpt.csv").open(encoding="utf-8") as file:
        return tuple(mpt_row(**each) for each in csv.DictReader(file))


def fitted_rows() -> list[Row]:
    """The rows to which constants may be fitted."""
    names = {_name(*line.split()) for line in FITTED.strip().splitlines()}
    return [row for row in mpt_rows() if row.name in names]


def unfitted_rows() -> list[Row]:
    """All other rows."""
    fitted = {row.name for row in fitted_rows()}
    return [row for row in mpt_rows() if row.name not in fitted]


def _name(model: str, gpus: str, gpu: str, length: str, micro: str, accumulation: str, precision: str) -> str:
    batch = f"{micro} x {accumulation}" if int(accumulation) > 1 else micro
    return f"MPT-{model}, {gpus} {gpu[:4].upper()}{gpu[4:7]}, {length} tokens, batch {batch}, {precision}"


def mpt_row(
    model: str,
    sequence: str,
    gpus: str,
    gpu: str,
    micro_batch: str,
    accumulation: str,
    precision: str,
    zero: str,
    recomputed: str,
    tokens_per_second_per_gpu: str,
) -> Row:
    """A run, from the columns of mpt.csv."""
    layers, heads, width = SHAPES[model]
    shape = GPTConfig(
        num_layers=layers,
        num_heads=heads,
        d_model=width,
        vocab_size=50368,
        sequence_length=int(sequence),
        bias=False,
    )
    config = ParallelismConfig(
        zero=int(zero),
        activation_checkpointing=ActivationCheckpointing.full if recomputed == "yes" else ActivationCheckpointing.none,
    )
    work = Workload(
        model=shape,
        parallelism=config,
        layout=resolve(config, int(gpus)),
        optimizer=AdamWConfig(),
        global_batch_size=int(gpus) * int(micro_batch) * int(accumulation),
        micro_batch_size=int(micro_batch),
        sequence_length=int(sequence),
        dtype="bf16",
        attention=Attention.sdpa,
        half_sums=precision == "bf16",
        fp8=precision == "amp_fp8",
        flat=True,
    )
    name = _name(model, gpus, gpu, sequence, micro_batch, accumulation, precision)
    keys = {"inter.shared": 1} if gpu.startswith("a100") else ON_H100
    return Row(
        name,
        CLUSTERS[gpu],
        work,
        float(tokens_per_second_per_gpu),
        TOKENS,
        keys=keys,
        stack=f"{STACK}, {gpu[:4].upper()}",
    )
