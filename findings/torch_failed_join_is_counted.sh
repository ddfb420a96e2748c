#!/bin/sh
# torch 2.13.0: a process whose init_process_group has failed cannot join others by calling it again.
#
# Rank 0 calls init_process_group with a time limit, and its peer does not come: it raises, and is_initialized() is False.
# It then calls it again with a fresh store, for which a peer is there. Both wait until their limit, and raise: torch
# names the default group after a count of the process's groups, which the failed call has raised to 1, and ranks look
# for each other under that name. If the peer has failed once as well, they meet. So a job whose ranks retry in the same
# process, some of them more often than others, never gets together again. Neither destroy_process_group, which
# refuses without a group, nor any other public function resets the count. The errors name neither the count nor a key.
# Seen with torch 2.13.0, Python 3.11, Linux x86, on 2026-11-30. Exit 0: as described; 1: it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/join.py" <<'PYTHON'
import os
from datetime import timedelta
from multiprocessing import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed import FileStore, HashStore


def joins(store: object, rank: int, seconds: float) -> bool:
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds))
    except RuntimeError:
        assert not dist.is_initialized()
        return False
    dist.destroy_process_group()
    return True


def run(rank: int, failed_before: tuple[int, ...], file: str, answers: SimpleQueue) -> None:
    if rank in failed_before:
        assert not joins(HashStore(), rank, 0.5)  # alone
    answers.put(joins(FileStore(file, 2), rank, 15))


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    print(f"torch {torch.__version__}")
    found = []
    for failed in ((), (0,), (0, 1)):
        answers = processes.get_context("spawn").SimpleQueue()
        processes.spawn(run, (failed, f"{os.environ['FOLDER']}/store{len(failed)}", answers), 2)
        found.append([answers.get(), answers.get()])
        print(f"failed before: {list(failed) or 'none'}; joined: {found[-1]}")
    assert found == [[True, True], [False, False], [True, True]], "a failed call is no longer counted"
PYTHON
FOLDER="$folder" "$folder/venv/bin/python" "$folder/join.py"
