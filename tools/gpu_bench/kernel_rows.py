"""part=kernels: each kernel and direction alone, as a share of a copy's rate, beside what else there is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from gptlite.kernels import bench
from gptlite.kernels.library import Unavailable, load

from .report import Part

HEAD = ("op", "direction", "shape", "dtype", "ms", "GB/s", "of a copy", "goal", "others' time over ours")
# Shares of a copy to reach, in percent, by op, direction and the least width.
GOALS = (
    ("layer_norm", "forward", 2048, 97),
    ("layer_norm", "forward", 0, 88),
    ("layer_norm", "backward", 0, 88),
    ("residual_norm", "backward", 0, 88),
    ("masked_softmax", "", 2048, 97),
    ("causal_softmax", "", 2048, 97),
    ("cross_entropy_", "", 32768, 98),
)
FIRST = "layer_norm,cross_entropy_,causal_softmax,residual_norm,bias_gelu"  # which torch.compile is worth its minutes


def run(part: Part, device: torch.device, tiny: bool) -> None:
    """All ops beside eager torch; then, while there is time, some beside compiled torch."""
    loaded = load(device.type, part.text)
    if isinstance(loaded, Unavailable):
        raise RuntimeError(f"no kernels: {loaded.reason}")
    part.text(f"Kernels: {'CUDA' if loaded.cuda and device.type == 'cuda' else loaded.isa}.")
    common = {"device": device.type, "repeats": 2 if tiny else 20}
    eager = bench.Options(ops="layer_norm" if tiny else "all", compile=False, **common)
    _measured(part, "eager", eager)
    if not tiny and not part.deadline.over:
        part.text("Beside torch.compile:")
        _measured(part, "compiled", bench.Options(ops=FIRST, compile=True, **common))


def _measured(part: Part, key: str, options: bench.Options) -> None:
    part.table(HEAD, [])
    rows: list[tuple[str, ...]] = []
    data: list[dict[str, Any]] = []
    for row in bench.rows(options):
        rows.append(_cells(row))
        data.append(asdict(row))
        part.put(key, data)
        part.replace_table(HEAD, rows)
        part.progress(len(rows), len(rows) + 1, " ".join(rows[-1][:3]))
        if part.deadline.over:
            part.put(f"{key}_cut", True)
            break
    part.reprint()


def goal_of(op: str, direction: str, width: int) -> int | None:
    """The share of a copy to reach, in percent, where there is one."""
    found = (
        percent
        for name, way, least, percent in GOALS
        if name == op and (not way or way == direction) and width >= least
    )
    return next(found, None)


def _cells(row: Any) -> tuple[str, ...]:
    goal = goal_of(row.op, row.direction, row.shape[-1])
    share = f"{row.share_of_copy:.0%}" + (" (missed)" if goal and 100 * row.share_of_copy < goal else "")
    others = ", ".join(f"{name} {ratio:.1f}" for name, ratio in row.ratios.items())
    shape = "x".join(map(str, row.shape))
    speed = f"{row.bytes / row.seconds / 1e9:.0f}"
    return row.op, row.direction, shape, row.dtype, f"{row.seconds * 1e3:.4f}", speed, share, f"{goal or ''}", others
