"""part=model: launches, bytes, FLOPs and the least time of a step, traced without a GPU; another tree's too."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import byte_model as rules
from .byte_model import AUDIT, CLASSES, GOALS, Model, model_of_trace
from .environment import child_environment
from .pictures import stacked_classes
from .report import Part
from .step_trace import Trace, trace_step

BATCH = {"small": 16, "xl": 16, "tiny": 2}
ROWS = 28  # of the table of ops; the JSON has all
# ns a token where all that can be fused is, and products are aligned; pointwise ops together stand under the norms.
LIMITS: dict[str, dict[str, float]] = {
    "small": {
        "GEMM block": 645,
        "GEMM head": 293,
        "attention": 394,
        "norm + residual": 103,
        "loss": 47,
        "optimizer": 28,
    },
    "xl": {
        "GEMM block": 9174,
        "GEMM head": 782,
        "attention": 1557,
        "norm + residual": 549,
        "loss": 47,
        "optimizer": 299,
    },
}
NAMES = {"small": "GPT-3 Small", "xl": "GPT-3 XL", "tiny": "a tiny GPT"}


def run(part: Part, sizes: tuple[str, ...], tree: str | None) -> None:
    """Traces each model here and, in another process, in `tree`, another commit's source tree."""
    part.text(
        "A dispatch trace of the trainer's own step (forward, backward, gradient norm, clipping, AdamW) on tensors "
        f"without data, with the ops a GPU takes. Rates: memory {rules.COPY / 1e12:g} TB/s, products "
        f"{rules.PRODUCT / 1e12:g} TFLOP/s, attention {rates('FA3')} (FlashAttention 3's class; {rates('FA2')} for "
        f"2's), layer norm at {rules.NORM_NARROW:.0%} of a copy below a width of {rules.NARROW} and "
        f"{rules.NORM_WIDE:.0%} from there on, its backward pass at {rules.NORM_BACKWARD:.0%}, cross entropy at "
        f"{rules.LOSS:.0%}, all else at a copy's rate; products with rows off 16 bytes take {rules.MISALIGNED:g} times "
        "as long. Rates are assumed, not measured here: the sum is a floor."
    )
    for index, size in enumerate(sizes):
        part.progress(index, len(sizes), f"tracing {NAMES[size]}")
        mine = model_of_trace(trace_step(size, BATCH[size]))
        other = model_of_trace(_traced_in(Path(tree), size)) if tree else None
        _say(part, size, mine, other)
    part.progress(len(sizes), len(sizes), "done")


def rates(attention: str) -> str:
    """`335 and 452 TFLOP/s for heads of 64 and 128`."""
    narrow, wide = rules.ATTENTION[attention].values()
    return f"{narrow / 1e12:.0f} and {wide / 1e12:.0f} TFLOP/s for heads of 64 and 128"


def _traced_in(tree: Path, size: str) -> Trace:
    program = Path(__file__).with_name("other_tree.py")
    command = [sys.executable, str(program), str(tree.resolve()), size, str(BATCH[size])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=child_environment())
    if done.returncode:
        raise RuntimeError(f"tree={tree}: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    return Trace.from_json(json.loads(done.stdout.splitlines()[-1]))


def _say(part: Part, size: str, mine: Model, other: Model | None) -> None:
    trace, total = mine.trace, mine.ns_a_token()
    part.text(
        f"**{NAMES[size]}**, {trace.micro_batch} x {trace.tokens // trace.micro_batch} tokens, bf16: "
        f"**{total:,.0f} ns a token** at least "
        f"({1e9 / total:,.0f} tokens/s); {mine.ns_a_token(slower=True):,.0f} with FlashAttention 2. "
        f"{mine.launches} launches a step, {len(trace.blocking_reads)} blocking reads"
        f"{_listed(trace.blocking_reads)}, {len(trace.copies_to_host)} copies to the host that nothing waits for, "
        f"{sum(row.misaligned for row in mine.misaligned)} products off 16 bytes."
    )
    if other is not None:
        part.text(
            f"The other tree: {other.ns_a_token():,.0f} ns a token, {other.ns_a_token(slower=True):,.0f} with "
            f"FlashAttention 2; {other.launches} launches, {len(other.trace.blocking_reads)} blocking reads, "
            f"{sum(row.misaligned for row in other.misaligned)} products off 16 bytes."
        )
    if mine.undeclared:
        part.failed(f"launches are not declared of {', '.join(mine.undeclared)}: byte_model.LAUNCHES counts them as 1")
    if size in GOALS:
        possible, goal = 1e9 / total, GOALS[size]
        part.text(
            f"The goal, {goal:,.0f} tokens/s, is {'possible' if possible >= goal else 'NOT possible'} by this sum."
        )
    _classes(part, size, mine, other)
    head = ("class", "op", "pass", "shapes", "calls", "launches", "MB", "GFLOP", "ns a token", "off 16 B")
    part.table(head, [_cells(row, trace.tokens) for row in mine.rows[:ROWS]])
    part.put(size, {"now": _json(mine), **({"other": _json(other)} if other else {})})
    bars = {"now": mine.by_class(), **({"other tree": other.by_class()} if other else {})}
    if size == "small":
        bars["audit of e6369ae"] = {name: float(AUDIT[name][0]) for name in CLASSES}
    if size in LIMITS:
        bars["limit, all fused"] = LIMITS[size]
    file = part.folder / f"model-{size}.png"
    goal = 1e9 / GOALS[size] if size in GOALS else None
    stacked_classes(file, f"{NAMES[size]}: least time by class", bars, goal)
    part.picture(file, f"Least time of a step of {NAMES[size]}, ns a token by class")


def _classes(part: Part, size: str, mine: Model, other: Model | None) -> None:
    audit = size == "small"
    head = [
        "class",
        "ns a token",
        *(["other tree"] if other else []),
        *(["audit", "why the audit's differs"] if audit else []),
    ]
    now, then = mine.by_class(), other.by_class() if other else {}
    rows = [
        [name, f"{now[name]:.0f}", *([f"{then[name]:.0f}"] if other else []), *(map(str, AUDIT[name]) if audit else ())]
        for name in CLASSES
    ]
    whole = ["sum", f"{sum(now.values()):.0f}", *([f"{sum(then.values()):.0f}"] if other else [])]
    part.table(head, [*rows, [*whole, *([str(sum(ns for ns, _ in AUDIT.values())), ""] if audit else [])]])


def _listed(reads: list[str]) -> str:
    return f" ({'; '.join(reads)})" if reads else ""


def _cells(row: Any, tokens: int) -> list[str]:
    op = row.op.removeprefix("aten.").replace("_scaled_dot_product_", "sdpa ")
    numbers = (f"{row.bytes / 1e6:.1f}", f"{row.flops / 1e9:.1f}", f"{row.ns / tokens:.2f}", str(row.misaligned or ""))
    return [row.group, op, row.phase, row.shapes, str(row.calls), str(row.launches), *numbers]


def _json(model: Model) -> dict[str, Any]:
    trace = model.trace
    return {
        "ns_a_token": model.ns_a_token(),
        "ns_a_token_fa2": model.ns_a_token(slower=True),
        "launches": model.launches,
        "blocking_reads": trace.blocking_reads,
        "copies_to_host": trace.copies_to_host,
        "products_off_16_bytes": [f"{row.op} {row.shapes}" for row in model.misaligned],
        "by_class": model.by_class(),
        "rows": [asdict(row) for row in model.rows],
    }
