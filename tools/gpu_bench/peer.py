"""part=peer: nanoGPT's compiled step, as in its train.py, and ours at the same shapes on the same device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nanogpt import Size, nanogpt_step
from real_step import BATCH, build_step, model_of, run_config

from gptlite.models.gpt.config import GPTConfig
from gptlite.parallelism.mesh import Mesh

from .report import Part, markdown_table
from .steps import forget, mfu, step_seconds

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

HEAD = ("model", "implementation", "ms a step", "tokens/s", "MFU")
VOCABULARY = 50304  # GPT-2's vocabulary, as padded by nanoGPT


def run(part: Part, options: Arguments) -> None:
    """Time nanoGPT's step and ours on models without biases. Compiled steps come first."""
    tiny, device = options.size == "tiny", torch.device(options.device)
    contenders = ("nanoGPT", "gptlite") if tiny else ("nanoGPT compiled", "gptlite compiled", "gptlite")
    part.text(
        "Both models have no biases and a vocabulary that needs no padding. AdamW, clipping at 1, no data loader."
    )
    cells = [(size, who) for size in (("tiny",) if tiny else ("small", "xl")) for who in contenders]
    rows: list[tuple[str, ...]] = []
    part.table(HEAD, rows)
    for index, (size, who) in enumerate(cells):
        part.progress(index, len(cells), f"{who}, {size}")
        if part.over:
            part.failed(f"no time left for {who}, {size}")
            break
        config = replace(model_of(size), vocab_size=256 if tiny else VOCABULARY, bias=False)
        try:
            seconds = step_seconds(step_of(who, config, BATCH[size], device, Path(str(options.peer)).expanduser()))
        except torch.OutOfMemoryError:
            rows.append((size, who, "out of memory", "", ""))
        else:
            rate = BATCH[size] * config.sequence_length / seconds
            share = mfu(rate, config, device)
            words = "n/a" if share is None else f"{share:.1%}"
            rows.append((size, who, f"{seconds * 1e3:.1f}", f"{rate:,.0f}", words))
            part.put(f"{size}, {who}", {"seconds": seconds, "tokens_per_second": rate})
        forget(device)
    part.log(markdown_table(HEAD, rows))


def step_of(who: str, config: GPTConfig, micro_batch: int, device: torch.device, folder: Path) -> Callable[[], Any]:
    """Return the training step of an implementation. `folder` is the clone of nanoGPT."""
    if who.startswith("gptlite"):
        return build_step(run_config(config, compile="compiled" in who), Mesh(device), micro_batch)
    shape = (config.vocab_size or 0, config.d_model, config.num_heads, config.num_layers, config.sequence_length)
    return nanogpt_step(folder, Size(*shape, micro_batch), "bf16_compile" if "compiled" in who else "bf16")
