"""part=kernels: each kernel and direction as a fraction of the copy bandwidth, compared with other implementations."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from gptlite.kernels import bench
from gptlite.kernels.library import Unavailable, load

from .report import Part, markdown_table

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

# Target fractions of the copy bandwidth, in percent, by op, direction and minimum width.
GOALS = (
    ("layer_norm", "forward", 2048, 97),
    ("layer_norm", "forward", 0, 88),
    ("layer_norm", "backward", 0, 88),
    ("residual_norm", "backward", 0, 88),
    ("residual_norm_amax", "backward", 0, 88),
    ("quantize_fp8", "", 0, 90),
    ("masked_softmax", "", 2048, 97),
    ("causal_softmax", "", 2048, 97),
    ("cross_entropy_", "", 32768, 98),
)
# Ops that are also timed with torch.compile, which takes minutes.
FIRST = "layer_norm,cross_entropy_,causal_softmax,residual_norm,bias_activation gelu_tanh,quantize_fp8"


def run(part: Part, options: Arguments) -> None:
    """Compare all ops with eager torch and then, if time is left, some ops with compiled torch."""
    tiny, device = options.size == "tiny", options.device
    loaded = load(device, part.text)
    if isinstance(loaded, Unavailable):
        raise RuntimeError(f"no kernels: {loaded.reason}")
    part.text(f"Kernels: {'CUDA' if loaded.cuda and device == 'cuda' else loaded.isa}.")
    repeats = 2 if tiny else 20
    measured(part, "eager", bench.Options(device, "layer_norm" if tiny else "all", compile=False, repeats=repeats))
    if not tiny and not part.over:
        part.text("Compared with torch.compile:")
        measured(part, "compiled", bench.Options(device, FIRST, compile=True, repeats=repeats))


def measured(part: Part, key: str, options: bench.Options) -> None:
    """Add a table, row by row while there is time. Ratios are times of other implementations divided by ours."""
    head, rows = (*bench.HEADER, "dtype", "goal"), []
    part.table(head, rows)
    part.put(key, [])
    for row in bench.rows(options):
        goal = goal_of(row.op, row.direction, row.shape[-1])
        missed = " (missed)" if goal and 100 * row.share_of_copy < goal else ""
        rows.append((*bench.cells(row), row.dtype, f"{goal or ''}{missed}"))
        part.put(key, [*part.data[key], asdict(row)])
        part.progress(len(rows), len(rows) + 1, " ".join(rows[-1][:3]))
        if part.over:
            part.put(f"{key}_cut", True)
            break
    part.log(markdown_table(head, rows))


def goal_of(op: str, direction: str, width: int) -> int | None:
    """Return the target fraction of the copy bandwidth, in percent, or None if there is none."""
    goals = (goal for name, way, least, goal in GOALS if name == op and way in ("", direction) and width >= least)
    return next(goals, None)
