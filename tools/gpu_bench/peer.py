"""part=peer: nanoGPT's compiled step, as its train.py takes it, and ours at the same shapes on the same device."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import bench_step
import torch

from gptlite.metrics.devices import device_peak_flops
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import flops_per_token
from gptlite.ops.config import OpsConfig
from gptlite.ops.select import select_ops
from gptlite.precision import Precision, PrecisionConfig, resolve_precision

from .real_step import Taken, build_step, model_of
from .report import Part
from .steps import step_seconds

BATCH = {"small": 16, "xl": 16, "tiny": 2}
VOCABULARY = 50304  # nanoGPT pads GPT-2's to it


def run(part: Part, device: torch.device, tiny: bool, folder: Path) -> None:
    """Times both, models of no biases, the compiled forms first."""
    rows: list[tuple[str, ...]] = []
    sizes = ("tiny",) if tiny else ("small", "xl")
    contenders = ("nanoGPT", "gptlite") if tiny else ("nanoGPT compiled", "gptlite compiled", "gptlite")
    part.text("Both without biases and with a vocabulary that needs no padding; AdamW, clipping at 1, no data loader.")
    cells = [(size, who) for size in sizes for who in contenders]
    for index, (size, who) in enumerate(cells):
        part.progress(index, len(cells), f"{who}, {size}")
        if part.deadline.over:
            part.failed(f"the time was over before {who}, {size}")
            break
        config = replace(model_of(size), vocab_size=256 if tiny else VOCABULARY, bias=False)
        try:
            seconds = _seconds(who, config, BATCH[size], device, folder)
        except torch.OutOfMemoryError:
            rows.append((size, who, "out of memory", "", ""))
            continue
        rate = BATCH[size] * config.sequence_length / seconds
        peak = device_peak_flops(device, torch.bfloat16)
        mfu = "n/a" if peak is None else f"{rate * flops_per_token(config, config.sequence_length) / peak:.1%}"
        rows.append((size, who, f"{seconds * 1e3:.1f}", f"{rate:,.0f}", mfu))
        part.put(f"{size}, {who}", {"seconds": seconds, "tokens_per_second": rate})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    part.table(("model", "who", "ms a step", "tokens/s", "MFU"), rows)


def _seconds(who: str, config: GPTConfig, micro_batch: int, device: torch.device, folder: Path) -> float:
    tokens = micro_batch * config.sequence_length
    if who.startswith("gptlite"):
        policy = resolve_precision(PrecisionConfig(Precision.bf16), device)
        ops = select_ops(OpsConfig(), device)
        return step_seconds(build_step(config, ops, policy, device, micro_batch, compile="compiled" in who), device)
    shape = (config.vocab_size or 0, config.d_model, config.num_heads, config.num_layers, config.sequence_length)
    mode = "bf16_compile" if "compiled" in who else "bf16"
    step = bench_step.peer_step(bench_step.Size(*shape, micro_batch), bench_step.Arguments(peer=str(folder)), mode)
    return step_seconds(Taken(step, None, config, tokens), device)  # type: ignore[arg-type]
