"""One rank of a calibration: `python -m gptlite.plan.calibrate_ranks STORE RANKS RANK`. Rank 0 prints what it found."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SMALL, LARGE = 1024, 2**20  # floats of the two sums
TRIES, IN_A_ROW = 5, 20
PRODUCT = 256  # dims of the product that ranks sharing cores compute
CROWD_SECONDS = 1.0


def main(store: Path, ranks: int, rank: int) -> None:
    """Times sums between the first two ranks, then products on rank 0 alone, then on all at once."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=30),
    )
    pair = dist.new_group([0, 1])
    found: dict[str, float] = {}
    if rank < 2:
        small, large = (_added(count, device, pair) for count in (SMALL, LARGE))
        # A sum over two ranks sends its bytes once, in two turns.
        found = {"latency": max(small, 1e-6) / 2, "gb_per_second": 4 * LARGE / max(large - small, 1e-6) / 1e9}
    dist.barrier()
    if not on_gpu:
        torch.set_num_threads(1)
        if rank == 0:
            found["alone"] = _product_seconds(CROWD_SECONDS)
        dist.barrier()
        crowded = torch.tensor(_product_seconds(CROWD_SECONDS))
        dist.all_reduce(crowded)
        found["crowded"] = float(crowded) / ranks
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _added(count: int, device: torch.device, group: Any) -> float:
    """Seconds that a sum over the ranks adds to a product before it, as it does to a layer: with the wait for a rank
    that was late, which sums in a row, each beginning where the one before has ended, would not show."""
    tensor, a = torch.ones(count, device=device), torch.randn(PRODUCT, PRODUCT, device=device)
    out = torch.empty_like(a)

    def work(summing: bool) -> float:
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            for _ in range(4):
                torch.mm(a, a, out=out)
            if summing:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / IN_A_ROW

    work(True)
    alone = min(work(False) for _ in range(TRIES))
    together = sorted(work(True) for _ in range(TRIES))
    return together[TRIES // 2] - alone


def _product_seconds(seconds: float) -> float:
    """Mean seconds of a product over that long: taking turns on a core is in the mean, not in the fastest."""
    a = torch.randn(PRODUCT, PRODUCT)
    out = torch.empty_like(a)
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        torch.mm(a, a, out=out)
        count += 1
    return passed / max(count, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
