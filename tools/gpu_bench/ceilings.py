"""part=ceilings: measured upper bounds of this device's speed: a copy, a large product and the head's products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptlite.kernels.timing import Task, clock_of, measure

from .report import Part

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

REPEATS = 30


def run(part: Part, options: Arguments) -> None:
    """Measure all ceilings; print and record them as bytes and FLOPs per second."""
    device, size = torch.device(options.device), 2**20 if options.size == "tiny" else 4 * 2**30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    task = Task(lambda pair: pair[1].copy_(pair[0]))
    copy = 2 * size / measure({"copy": task}, [(source, torch.empty_like(source))], REPEATS, clock_of(device))["copy"]
    part.text(f"A device-to-device copy of {size / 1e9:.1f} GB moves **{copy / 1e12:.3f} TB/s**, reads plus writes.")
    part.put("copy_bytes_per_second", copy)
    rows: list[tuple[str, ...]] = []
    part.table(("bf16 product, random data", "ms", "TFLOP/s"), rows)
    for name, a, b in products(device, options.size == "tiny"):
        if part.over:
            part.failed(f"no time left for {name}")
            break
        product = Task(lambda out, a=a, b=b: torch.mm(a, b, out=out))
        seconds = measure({name: product}, [a @ b], REPEATS, clock_of(device))[name]
        rate = 2 * a.numel() * b.shape[1] / seconds
        rows.append((name, f"{seconds * 1e3:.3f}", f"{rate / 1e12:.1f}"))
        part.put(name, {"seconds": seconds, "flops_per_second": rate})
        part.log(f"{name}: {' ms, '.join(rows[-1][1:])} TFLOP/s")


def products(device: torch.device, tiny: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name and operands of a large product, then of the LM head's products.

    These are the logits and the gradients of the head's input and weight, with aligned and with unaligned rows.
    """
    side, tokens = (128, 64) if tiny else (8192, 16384)
    random = partial(torch.randn, dtype=torch.bfloat16, device=device)
    yield f"{side} cubed", random(side, side), random(side, side)
    for width in (32,) if tiny else (768, 2048):
        for columns in (251, 256) if tiny else (50257, 50304):
            label = f"head {tokens}x{width}x{columns}"
            hidden, table, logits = random(tokens, width), random(columns, width), random(tokens, columns)
            yield f"{label}, forward", hidden, table.t()
            yield f"{label}, its input's gradient", logits, table
            yield f"{label}, its table's gradient", logits.t(), hidden
