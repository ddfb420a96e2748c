#!/bin/sh
# torch 2.13.0, gloo: the sum that all_reduce returns for an element depends on the element's position in the tensor.
#
# Three ranks hold the same numbers in all elements: 1e8, 1 and -1e8. The ring adds each third of the tensor in another
# order of the ranks, so that a third of the sums is 1 and two thirds are 0. With two ranks all sums are equal, as
# addition commutes. So a parameter that several groups of ranks hold gets other bits in each group if other parameters
# before it in the same buffer have another size there: copies of a position embedding drift apart over tensor-parallel
# ranks whose slices of an uneven vocabulary are in the same bucket. No error or warning shows it.
# Seen with torch 2.13.0 and 2.15.0, Python 3.11, Linux x86, on 2026-11-29. Exit 0: as described; 1: it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/order.py" <<'PYTHON'
import os
from collections import Counter

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

NUMBERS = (1e8, 1.0, -1e8)


def sums(rank: int, world: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    tensor = torch.full((3000,), NUMBERS[rank])
    dist.all_reduce(tensor)
    counts = Counter(tensor.tolist())
    if rank == 0:
        print(f"{world} ranks: {', '.join(f'{count} sums of {value:g}' for value, count in sorted(counts.items()))}")
        assert len(counts) == (1 if world == 2 else 2), "the order no longer depends on the position"
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    print(f"torch {torch.__version__}")
    for world in (2, 3):
        processes.spawn(sums, (world, f"{os.environ['FOLDER']}/store{world}"), world)
PYTHON
FOLDER="$folder" "$folder/venv/bin/python" "$folder/order.py"
