#!/bin/sh
# torch 2.13.0, torchrun with the c10d rendezvous: after the loss of the node with rank 0, the nodes that are left get
# different addresses of a master, so their ranks cannot meet.
#
# Three agents start a worker each, with a rendezvous store that does not fail, and --nnodes=2:3. Then the agent whose
# node is the first is lost. The agents that are left hold a second rendezvous, and start workers of a world of two: the
# new rank 0 has its own node's MASTER_ADDR and MASTER_PORT, rank 1 still has those of the lost node, as an agent keeps
# the store that it has learned first (TCPStore sharing). init_process_group waits there until its time limit. With
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of the agents, both have the new address.
# Seen with torch 2.13.0, Python 3.11, Linux x86, on 2026-11-30. Exit 0: as described; 1: the behaviour has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/worker.py" <<'PYTHON'
import os
import sys
import time

folder, world = sys.argv[1], os.environ["WORLD_SIZE"]
names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
with open(f"{folder}/world-{world}-rank-{os.environ['RANK']}", "w") as file:
    file.write(" ".join([*(os.environ[name] for name in names), str(os.getppid())]))
while not (world == "3" and os.path.exists(f"{folder}/lost")):
    time.sleep(0.1)
    if os.path.exists(f"{folder}/end"):
        sys.exit(0)
sys.exit(1)  # as a rank does whose collective has lost a peer
PYTHON
cat > "$folder/run.py" <<'PYTHON'
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore


def until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "the agents did not get there in 300 s"
        time.sleep(0.1)


def second_world(folder: Path, share: bool) -> list[list[str]]:
    folder.mkdir()
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=9"]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=finding"]
    agent += ["--rdzv-conf=is_host=0,last_call_timeout=3,keep_alive_interval=1"]
    more = {} if share else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    worker = [str(folder.parent / "worker.py"), str(folder)]
    agents = [
        subprocess.Popen([*agent, f"--local-addr=127.0.0.{n}", *worker], env=os.environ | more, stderr=subprocess.DEVNULL)
        for n in (2, 3, 4)
    ]
    try:
        until(lambda: len(list(folder.glob("world-3-*"))) == 3)
        time.sleep(0.5)
        first = int((folder / "world-3-rank-0").read_text().split()[3])
        next(each for each in agents if each.pid == first).kill()
        (folder / "lost").touch()
        until(lambda: len(list(folder.glob("world-2-*"))) == 2)
        time.sleep(0.5)
        worlds = [(folder / f"world-{world}-rank-{rank}").read_text().split() for world, rank in ((3, 0), (2, 0), (2, 1))]
        (folder / "end").touch()
        return worlds
    finally:
        for each in agents:
            each.send_signal(signal.SIGTERM)
        for each in agents:
            each.wait()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    for share in (True, False):
        lost, *left = second_world(Path(os.environ["FOLDER"]) / f"share-{share}", share)
        print(f"{'by default' if share else 'without sharing'}: the lost node was {lost[1]}")
        for rank, address, port, _ in left:
            print(f"  then rank {rank} has MASTER_ADDR {address}, {'the same' if port == left[0][2] else 'another'} port")
        assert (left[0][1:3] == left[1][1:3]) == (not share), "the addresses no longer differ as described"
        assert not share or left[1][1:3] == lost[1:3], "rank 1 no longer has the address of the lost node"
PYTHON
FOLDER="$folder" "$folder/venv/bin/python" "$folder/run.py"
