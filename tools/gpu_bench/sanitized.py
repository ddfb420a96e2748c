"""Program for compute-sanitizer that runs every CUDA kernel on small shapes with edge cases in all dims."""

from __future__ import annotations

import sys
from itertools import product

import torch

from gptlite.kernels.cases import CASES
from gptlite.kernels.library import Unavailable, load

SHAPES = ((3, 5), (17, 72), (9, 1030))  # one element beyond whole packs, whole packs, a row of several warps
DTYPES = (torch.float32, torch.bfloat16)


def main(device: str = "cuda") -> int:
    """Run the ops and return the exit code, 1 if there are no kernels."""
    loaded = load(device)
    if isinstance(loaded, Unavailable):
        print(f"no kernels: {loaded.reason}", file=sys.stderr)
        return 1
    cases = [case for case in CASES if not case.cpu_only]
    for case, shape, dtype in product(cases, SHAPES, DTYPES):
        case.ours(case.make(*shape, dtype, torch.device(device)))
        if device == "cuda":
            torch.cuda.synchronize()
    print(f"{len(cases)} ops, {len(SHAPES)} shapes, {len(DTYPES)} dtypes")
    return 0
