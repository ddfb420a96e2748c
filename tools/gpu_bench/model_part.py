"""part=model: launches, bytes, FLOPs and least time of a step, traced without a GPU in one or two source trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real_step import BATCH

from . import byte_model as rules
from .byte_model import CLASSES, GOALS, Model, Row, model_of_trace
from .environment import child_environment
from .pictures import stacked_classes
from .report import Part
from .step_trace import Trace, trace_step

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

ROWS = 28  # rows of the table of ops that the report shows; the JSON has all rows
# ns per token with every possible fusion and aligned products. Pointwise ops are all counted as norms.
FUSED = ("GEMM block", "GEMM head", "attention", "norm + residual", "loss", "optimizer")
LIMITS: dict[str, dict[str, float]] = {
    "small": dict(zip(FUSED, (645.0, 293.0, 394.0, 103.0, 47.0, 28.0), strict=True)),
    "xl": dict(zip(FUSED, (9174.0, 782.0, 1557.0, 549.0, 47.0, 299.0), strict=True)),
}
NAMES = {"small": "GPT-3 Small", "xl": "GPT-3 XL", "tiny": "a tiny GPT"}

# Program that runs in another source tree and prints its trace as JSON.
TRACE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import gptlite
from gpu_bench.step_trace import trace_step
assert Path(gptlite.__file__).is_relative_to(Path.cwd()), f"gptlite is imported from {gptlite.__file__}"
print(json.dumps(asdict(trace_step(sys.argv[1], int(sys.argv[2])))))
"""


def run(part: Part, options: Arguments) -> None:
    """Trace each model in this source tree and, in another process, in `tree`, that of another commit."""
    part.text(
        "A dispatch trace of the trainer's own step (forward, backward, gradient norm, clipping, AdamW) on tensors "
        f"without data, with the ops that a GPU uses. Rates: memory {rules.COPY / 1e12:g} TB/s, products "
        f"{rules.PRODUCT / 1e12:g} TFLOP/s, attention {rates('FA3')} (FlashAttention 3; {rates('FA2')} for "
        f"FlashAttention 2), layer norm at {rules.NORM_NARROW:.0%} of copy bandwidth below a width of {rules.NARROW} "
        f"and {rules.NORM_WIDE:.0%} from there on, its backward pass at {rules.NORM_BACKWARD:.0%}, cross entropy at "
        f"{rules.LOSS:.0%}, all else at 100%. Products with rows that are not aligned to 16 bytes take "
        f"{rules.MISALIGNED:g} times as long. Products in fp8 run at {rules.FP8_PRODUCT / 1e12:g} TFLOP/s. These rates "
        "are assumed, not measured. The sum is a lower bound."
    )
    steps = [("tiny", each) for each in ("bf16", "fp8+head")] if options.size == "tiny" else list(GOALS)
    for index, (size, precision) in enumerate(steps):
        part.progress(index, len(steps), f"tracing {NAMES[size]} in {precision}")
        models = {"now": model_of_trace(trace_step(size, BATCH[size], precision))}
        if options.tree and precision == "bf16":
            models["other tree"] = model_of_trace(traced_in(Path(options.tree).expanduser().resolve(), size))
        _say(part, size, precision, models)
    part.progress(len(steps), len(steps), "done")


def rates(attention: str) -> str:
    """Return the rates of an attention kernel as text, such as `335 and 452 TFLOP/s for heads of 64 and 128`."""
    narrow, wide = rules.ATTENTION[attention].values()
    return f"{narrow / 1e12:.0f} and {wide / 1e12:.0f} TFLOP/s for heads of 64 and 128"


def traced_in(tree: Path, size: str) -> Trace:
    """Return the trace of another source tree's step, recorded by the code in that tree. Raises RuntimeError."""
    path = os.pathsep.join([str(tree), str(tree / "tools"), child_environment()["PYTHONPATH"]])
    command = [sys.executable, "-c", TRACE, size, str(BATCH[size])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise RuntimeError(f"tree={tree}: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    return Trace.from_json(json.loads(done.stdout.splitlines()[-1]))


def _say(part: Part, size: str, precision: str, models: dict[str, Model]) -> None:
    mine, other = models["now"], models.get("other tree")
    trace, total, goal = mine.trace, mine.ns_a_token(), GOALS.get((size, precision))
    reads = f" ({'; '.join(trace.blocking_reads)})" if trace.blocking_reads else ""
    part.text(
        f"**{NAMES[size]}**, {trace.micro_batch} x {trace.tokens // trace.micro_batch} tokens, {precision}: "
        f"**{total:,.0f} ns per token** at least "
        f"({1e9 / total:,.0f} tokens/s); {mine.ns_a_token(slower=True):,.0f} with FlashAttention 2. "
        f"{mine.launches} launches a step, {len(trace.blocking_reads)} blocking reads"
        f"{reads}, {len(trace.copies_to_host)} asynchronous copies to the host, "
        f"{sum(row.misaligned for row in mine.misaligned)} products not aligned to 16 bytes."
    )
    if other is not None:
        part.text(
            f"The other tree: {other.ns_a_token():,.0f} ns per token, {other.ns_a_token(slower=True):,.0f} with "
            f"FlashAttention 2; {other.launches} launches, {len(other.trace.blocking_reads)} blocking reads, "
            f"{sum(row.misaligned for row in other.misaligned)} products not aligned to 16 bytes."
        )
    if mine.undeclared:
        part.failed(f"byte_model.LAUNCHES lacks {', '.join(mine.undeclared)}; a call is counted as 1 launch")
    if goal:
        possible = "possible" if 1e9 / total >= goal else "NOT possible"
        part.text(f"By this sum, the goal of {goal:,.0f} tokens/s is {possible}.")
    bars = {name: model.by_class() for name, model in models.items()}
    columns = [{**bar, "sum": sum(bar.values())} for bar in bars.values()]
    rows = [[name, *(f"{column[name]:.0f}" for column in columns)] for name in (*CLASSES, "sum")]
    part.table(["class", "ns per token", *list(bars)[1:]], rows)
    head = ("class", "op", "pass", "shapes", "calls", "launches", "MB", "GFLOP", "ns per token", "off 16 B")
    part.table(head, [_cells(row, trace.tokens) for row in mine.rows[:ROWS]])
    name, title = (size, NAMES[size]) if precision == "bf16" else (f"{size}-{precision}", f"{NAMES[size]}, {precision}")
    part.put(name, {tree.split()[0]: _json(model) for tree, model in models.items()})
    if name in LIMITS:
        bars["limit, all fused"] = LIMITS[name]
    file = part.folder / f"model-{name}.png"
    stacked_classes(file, f"{title}: least time by class", bars, 1e9 / goal if goal else None)
    part.picture(file, f"Least time of a step of {title}, ns per token by class")


def _cells(row: Row, tokens: int) -> list[str]:
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
