#!/bin/sh
# torchft 0.2.0: DistributedDataParallel ends the surviving replica with an AssertionError when another replica is lost
# during the backward pass.
#
# torchft's Manager is meant to keep the error of a collective, so that the optimizer discards the step and the replicas
# that are left go on. The communication hook of its DistributedDataParallel waits for the work and then asserts that the
# work has a future. The future is set only after a wait without an error, so that the hook raises from loss.backward()
# (torchft/ddp.py, _comm_hook). All replicas that share the collective end, and with them the only copies of the state.
# With manager.allreduce on each gradient instead, the survivor discards the step and trains the next one alone.
# A related case is reported upstream: https://github.com/meta-pytorch/torchft/pull/294
# Runs on a CPU. Seen with Python 3.11 and torch 2.13.0 on 2026-11-29.
# Exit 0: as described; 1: the behaviour has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torchft==0.2.0 torch==2.13.0 numpy==2.4.6
python="$folder/venv/bin/python"
cat > "$folder/replica.py" <<'PYTHON'
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

name, way, lighthouse = sys.argv[1:]
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
model = nn.Linear(4, 4)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=lambda state: model.load_state_dict(state),
    state_dict=lambda: model.state_dict(),
    replica_id=name,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=lighthouse,
)
wrapped = DistributedDataParallel(manager, model) if way == "ddp" else model
optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
while manager.current_step() < 6:
    optimizer.zero_grad()
    loss = wrapped(torch.ones(2, 4)).square().sum()
    if name == "lost" and manager.current_step() >= 3:
        manager.wait_quorum()  # the other replica counts on this one
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    if way == "allreduce":
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
    before = manager.current_step()
    optimizer.step()
    if name == "stays":
        state = "committed" if manager.current_step() > before else "discarded"
        print(f"step {before + 1} {state} by {manager.num_participants()} replicas", flush=True)
manager.shutdown()
PYTHON
"$python" - "$folder/replica.py" 2> "$folder/log" <<'PYTHON' || { tail -n 20 "$folder/log"; exit 1; }
import subprocess
import sys

from torchft.coordination import LighthouseServer

for way, expected in (("ddp", 1), ("allreduce", 0)):
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=5000, quorum_tick_ms=100)
    words = [sys.executable, sys.argv[1]]
    names = ("stays", "lost")
    pipe = subprocess.PIPE
    started = [subprocess.Popen([*words, n, way, lighthouse.address()], stdout=pipe, stderr=pipe, text=True) for n in names]
    output, errors = started[0].communicate(timeout=120)
    started[1].communicate(timeout=120)
    lighthouse.shutdown()
    last = errors.strip().splitlines()[-1] if started[0].returncode else ""
    print(f"{way}: the survivor exits with {started[0].returncode} {last}")
    print("".join(f"    {line}\n" for line in output.splitlines()), end="")
    if started[0].returncode != expected or (expected and "AssertionError" not in errors):
        raise SystemExit(f"changed: {errors[-2000:]}")
PYTHON
