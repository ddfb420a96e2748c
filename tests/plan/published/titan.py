"""torchtitan's Llama 3.1 on H100s of 96 GiB, 2,400 GB/s and 500 W: its benchmarks of December 2024 and June 2025, and
Trainy's on H200s.

torchtitan's selective checkpointing keeps every other product. What its rows have and gptlite has not: asynchronous
tensor parallelism, and gathers of weights in fp8, which are not modelled. Its context parallelism passes keys around a
ring, and ours gathers them.
"""

from __future__ import annotations

from typing import Any

from gptlite.models.gpt.config import GPTConfig, MLPKind, Norm, Position
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan.workload import Workload
from plan.published.row import FLASH_2_ON_H100, TOKENS, Row

EAGER, COMPILED = "torchtitan, eager", "torchtitan, compiled"
GRAND_TETON: dict[str, Any] = {
    **FLASH_2_ON_H100,
    "memory_gib": 96,
    "memory_gb_per_second": 2400,
    "power_watts": 500,
    "quantised_bytes": 4,  # compiled code finds the largest value where the tensor is made
}
# gptlite's attention and pointwise kernels were measured on an H200; these are the values of dgx-h100.
H200: dict[str, Any] = FLASH_2_ON_H100 | {
    "attention_half_width": 13,
    "memory_efficiency": 0.58,
    "matmul_efficiency.bf16": 0.7,
    "matmul_efficiency.fp8": 0.6,
    "matmul_half_size": 192,
    "quantised_bytes": 4,
}
# Of our 14 transfers of a block in all passes under sequence parallelism and recomputation, DTensor makes ten: it does
# not gather inputs again, nor reduce outputs that are not needed. In fp8, its six gathers send half of the bytes.
NOT_SENT, NOT_SENT_FP8 = 4 / 14, 7 / 14
HIDDEN = 0.8  # of the others, with asynchronous tensor parallelism
SHAPES = {"8B": (32, 32, 4096, 14336), "70B": (80, 64, 8192, 28672), "405B": (126, 128, 16384, 53248)}


def fitted_rows() -> list[Row]:
    """The rows to which constants may be fitted."""
    return [
        titan("8B, eager", 8, 2, 1, 5762, stack=EAGER),
        titan("8B, TP 8", 64, 12, 1, 4378, tensor=8),
    ]


def unfitted_rows() -> list[Row]:
    """The rows that are kept to check the fit. The fourth number is that of micro-batches."""
    full: dict[str, Any] = {"recomputed": ActivationCheckpointing.full}
    rows = [
        titan("8B", 8, 2, 1, 6667),
        titan("8B, fp8", 8, 2, 1, 8532, fp8=True),
        titan("8B, eager", 128, 2, 1, 5605, stack=EAGER),
        titan("8B", 128, 2, 1, 6514),
        titan("8B, fp8", 128, 2, 1, 8380, fp8=True),
        titan("8B, TP 8, fp8", 64, 12, 1, 5078.1, tensor=8, fp8=True),
        titan("8B, asynchronous TP 8", 64, 12, 1, 4809.4, tensor=8, hidden=True),
        titan("8B, asynchronous TP 8, fp8", 64, 12, 1, 5570.1, tensor=8, hidden=True, fp8=True),
        titan("70B, TP 8", 256, 16, 1, 597.3, tensor=8, **full),
        titan("70B, TP 8, fp8", 256, 16, 1, 809.8, tensor=8, fp8=True, **full),
        titan("70B, TP 8, fp8, 2024", 256, 16, 1, 829, tensor=8, fp8=True, **full),
        titan("70B, asynchronous TP 8", 256, 16, 1, 652.4, tensor=8, hidden=True, **full),
        titan("70B, asynchronous TP 8, fp8", 256, 16, 1, 942.4, tensor=8, hidden=True, fp8=True, **full),
        titan("8B, fp8", 32, 2, 1, 10938, fp8=True, cluster="h200"),
        titan("8B, fp8", 64, 2, 1, 10753, fp8=True, cluster="h200"),
        titan("8B, fp8, 32768 tokens", 8, 1, 1, 3890, length=32768, fp8=True, **full),
    ]
    for context, speed in ((2, 2540), (4, 1071), (8, 548)):
        rows.append(
            titan(f"8B, fp8, CP {context}", 8, 1, 1, speed, length=32768 * context, context=context, fp8=True, **full)
        )
    for schedule, speed in (("1f1b", 100), ("interleaved_1f1b", 128)):
        stages = {"virtual_stages": 2} if schedule != "1f1b" else {}
        layout: dict[str, Any] = {"tensor": 8, "pipeline": 8, "schedule": schedule, **stages}
        rows.append(titan(f"405B, fp8, {schedule}", 512, 1, 32, speed, hidden=True, fp8=True, **layout, **full))
    return rows


def titan(
    name: str,
    world: int,
    micro: int,
    accumulation: int,
    speed: float,
    length: int = 8192,
    stack: str = COMPILED,
    fp8: bool = False,
    hidden: bool = False,
    cluster: str = "dgx-h100",
    recomputed: ActivationCheckpointing = ActivationCheckpointing.selective,
    **layout: Any,
) -> Row:
    """A run of Llama 3.1 with ZeRO 3, or with ZeRO 2 in a pipeline. `hidden`: tensor parallelism is asynchronous."""
    unsent = NOT_SENT_FP8 if fp8 else NOT_SENT
    size = name.partition(",")[0]
    layers, heads, width, inner = SHAPES[size]
    model = GPTConfig(
        num_layers=layers,
        num_heads=heads,
        kv_heads=8,
        d_model=width,
        d_ff=inner,
        vocab_size=128256,
        sequence_length=length,
        position=Position.rope,
        norm=Norm.rms_norm,
        mlp=MLPKind.swiglu,
        bias=False,
        tied_embeddings=False,
    )
    config = ParallelismConfig(
        zero=3 if layout.get("pipeline", 1) == 1 else 2,
        sequence=layout.get("tensor", 1) > 1,
        activation_checkpointing=recomputed,
        **layout,
    )
    its = resolve(config, world)
    work = Workload(
        model=model,
        parallelism=config,
        layout=its,
        optimizer=AdamWConfig(),
        global_batch_size=its.data_size * micro * accumulation,
        micro_batch_size=micro,
        sequence_length=length,
        dtype="bf16",
        attention=Attention.sdpa,
        fp8=fp8,
    )
    return Row(
        f"Llama-3.1 {name}, {world} {'H200' if cluster == 'h200' else 'H100'}",
        cluster,
        work,
        speed,
        TOKENS,
        keys=(H200 if cluster == "h200" else GRAND_TETON) | {"tensor_overlap": unsent + hidden * HIDDEN * (1 - unsent)},
        stack=stack,
        half_kept=recomputed is ActivationCheckpointing.selective,
    )
