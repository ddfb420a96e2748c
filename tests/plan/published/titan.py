"""torchtitan's Llama 3.1 on H100s of 96 GiB, 2,400 GB/s and 500 W: its benchmarks of December 2024 and June 2025.

torchtitan's selective checkpointing keeps
every other product. What its rows have and gptlite has not: asynchronous tensor parallelism, of which only the overlap in
the backward pass is modelled, and gathers of weights in fp8.
"""

from __future__ import annotations

from typing import Any

from gptlite.models.gpt.config import GPTConfig, MLPKind, Norm, Position
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.plan.workload import Workload
from plan.published.row import TOKENS, Row

EAGER, COMPILED = "torchtitan, eager", "torchtitan, compiled"
GRAND_TETON: dict[str, Any] = {
    "memory_gib": 96,
    "memory_gb_per_second": 2400,
    "power_watts": 500,
}
# Of our ten transfers of a block's recomputation and backward pass under sequence parallelism, DTensor makes six: it
# neither gathers inputs again nor reduces outputs that are not needed. This share of two thirds of the ten is left out.
NOT_MADE = 0.6
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
        titan("8B, asynchronous TP 8", 64, 12, 1, 4809.4, tensor=8, hidden=1.0),
        titan("8B, asynchronous TP 8, fp8", 64, 12, 1, 5570.1, tensor=8, hidden=1.0, fp8=True),
        titan("70B, TP 8", 256, 16, 1, 597.3, tensor=8, **full),
        titan("70B, TP 8, fp8", 256, 16, 1, 809.8, tensor=8, fp8=True, **full),
        titan("70B, TP 8, fp8, 2024", 256, 16, 1, 829, tensor=8, fp8=True, **full),
        titan("70B, asynchronous TP 8", 256, 16, 1, 652.4, tensor=8, hidden=1.0, **full),
        titan("70B, asynchronous TP 8, fp8", 256, 16, 1, 942.4, tensor=8, hidden=1.0, fp8=True, **full),
        titan("8B, fp8, 32768 tokens", 8, 1, 1, 3890, length=32768, fp8=True, **full),
    ]
    for context, speed in ((2, 2540), (4, 1071), (8, 548)):
        rows.append(
            titan(f"8B, fp8, CP {context}", 8, 1, 1, speed, length=32768 * context, context=context, fp8=True, **full)
        )
    for schedule, speed in (("1f1b", 100), ("interleaved_1f1b", 128)):
        stages = {"virtual_stages": 2} if schedule != "1f1b" else {}
        layout: dict[str, Any] = {"tensor": 8, "pipeline": 8, "schedule": schedule, **stages}
        rows.append(titan(f"405B, fp8, {schedule}", 512, 1, 32, speed, hidden=1.0, fp8=True, **layout, **full))
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
    hidden: float = NOT_MADE,
    recomputed: ActivationCheckpointing = ActivationCheckpointing.selective,
    **layout: Any,
) -> Row:
    """A run of Llama 3.1 with ZeRO 3, or with ZeRO 1 in a pipeline. `hidden`: the share of tensor parallelism's traffic
    of the backward pass that is not waited for."""
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
        f"Llama-3.1 {name}, {world} H100",
        "dgx-h100",
        work,
        speed,
        TOKENS,
        keys=GRAND_TETON | {"tensor_overlap": hidden},
        stack=stack,
        half_kept=recomputed is ActivationCheckpointing.selective,
    )
