"""part=ceilings: what this device reaches at best: a copy, a large product, the head's products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .report import Part
from .timing import Timer

COPY_BYTES = {False: 4 * 2**30, True: 2**20}
SQUARE = {False: 8192, True: 128}
TOKENS, WIDTHS = {False: 16384, True: 64}, {False: (768, 2048), True: (32,)}
COLUMNS = {False: (50257, 50304), True: (251, 256)}
REPEATS = {False: 30, True: 3}


@dataclass(frozen=True)
class Product:
    """One matrix product, with its operands' shapes."""

    what: str
    call: Callable[[], Any]
    flops: int


def run(part: Part, device: torch.device, tiny: bool) -> None:
    """Prints and keeps bytes and FLOPs a second."""
    timer, repeats = Timer(device), REPEATS[tiny]
    copy = copy_rate(timer, COPY_BYTES[tiny], repeats)
    part.text(
        f"A device-to-device copy of {COPY_BYTES[tiny] / 1e9:.1f} GB moves **{copy / 1e12:.3f} TB/s**, read and "
        "written."
    )
    part.put("copy_bytes_per_second", copy)
    side, rows = SQUARE[tiny], []
    products = [Product(f"{side} cubed", *_square(side, device))]
    for width in WIDTHS[tiny]:
        for columns in COLUMNS[tiny]:
            products += head_products(TOKENS[tiny], width, columns, device)
    for index, product in enumerate(products):
        if part.deadline.over:
            part.failed(f"the time was over before {product.what}")
            break
        seconds = timer.seconds(product.call, repeats)
        rate = product.flops / seconds
        part.put(product.what, {"seconds": seconds, "flops_per_second": rate})
        rows.append((product.what, f"{seconds * 1e3:.3f}", f"{rate / 1e12:.1f}"))
        part.progress(index + 1, len(products), product.what)
    part.table(("bf16 product, random data", "ms", "TFLOP/s"), rows)


def copy_rate(timer: Timer, size: int, repeats: int) -> float:
    """Bytes a second that a copy of `size` bytes reads and writes."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return 2 * size / timer.seconds(lambda: target.copy_(source), repeats)


def head_products(tokens: int, width: int, columns: int, device: torch.device) -> list[Product]:
    """The head's three: logits, the gradient of what it is given, and the table's. Rows of `columns`, odd or not."""
    hidden, table, logits = (_random(shape, device) for shape in ((tokens, width), (columns, width), (tokens, columns)))
    flops, label = 2 * tokens * width * columns, f"head {tokens}x{width}x{columns}"
    out = {"logits": torch.empty_like(logits), "hidden": torch.empty_like(hidden), "table": torch.empty_like(table)}
    return [
        Product(f"{label}, forward", lambda: torch.mm(hidden, table.t(), out=out["logits"]), flops),
        Product(f"{label}, its input's gradient", lambda: torch.mm(logits, table, out=out["hidden"]), flops),
        Product(f"{label}, its table's gradient", lambda: torch.mm(logits.t(), hidden, out=out["table"]), flops),
    ]


def _square(side: int, device: torch.device) -> tuple[Callable[[], Any], int]:
    a, b = (_random((side, side), device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * side**3


def _random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)
