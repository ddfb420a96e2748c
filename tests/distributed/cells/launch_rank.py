"""A rank of test_launch.py: gptlite.launch.worker with a stand-in for training, which does what the test needs.

    python launch_rank.py BEHAVIOUR KEY=VALUE...                   as train.py, which starts two ranks:
    python launch_rank.py BEHAVIOUR FOLDER STARTED LAUNCHER        one of them
    torchrun ... launch_rank.py BEHAVIOUR KEY=VALUE...             as torchrun and srun start train.py

A behaviour that ends in a number is that rank's alone.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gptlite.commands.train import guarded
from gptlite.config import Config, load
from gptlite.errors import ConfigError
from gptlite.launch.elastic import run_ranks
from gptlite.launch.starter import starter
from gptlite.launch.worker import main, under
from gptlite.trainer.signals import StopSignal

STEP_SECONDS = 0.05


def stand_in(config: Config, started: float, stop: StopSignal, opened: Callable[[Path], None] | None) -> int:
    """Counts steps in the run folder until the end or a signal, then saves together with the others."""
    rank, run_dir, behaviour = dist.get_rank(), Path(config.run.dir), sys.argv[1]
    act = behaviour.rstrip("0123456789") if behaviour[-1] not in "0123456789" or behaviour[-1] == str(rank) else ""
    if act == "refuse":
        raise ConfigError("model.num_layers=7: not with this test")
    if act == "prepare":
        (run_dir.parent / f"preparing-{rank}").touch()
        time.sleep(60)
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if opened:
        opened(run_dir)
    print(f"rank {rank} prints, tty {os.isatty(1)}, seed {config.seed}", flush=True)
    print(f"rank {rank} warns", file=sys.stderr)
    first = max([int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")], default=0)
    with stop:
        for step in range(first + 1, config.trainer.max_steps + 1):
            time.sleep(STEP_SECONDS)
            asked = torch.tensor([float(stop.received or 0)])
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            (run_dir / f"training-{rank}").touch()
            if step == 4 and not first:
                (run_dir / "acted").touch()
                misbehave(act, behaviour, rank)
            if int(asked):
                if act == "stubborn":
                    time.sleep(60)
                if rank == 0:
                    (checkpoints / f"step-{step}").touch()
                dist.barrier()
                return 128 + int(asked)
            if rank == 0 and step % 3 == 0:
                (checkpoints / f"step-{step}").touch()
    return 0


def misbehave(act: str, behaviour: str, rank: int) -> None:
    """What a rank does in its fourth step."""
    match act:
        case "raise" | "stuck":
            raise ValueError("the weights are upside down")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            torch.empty(2**46)
        case "":
            if behaviour == "stuck1" and rank == 0:
                wait_for_ever()


def wait_for_ever() -> None:
    """As in a collective that a dead rank will not come to: in C, where no Python answers a signal."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


if __name__ == "__main__":
    if "=" not in sys.argv[2]:
        main(sys.argv[2:], stand_in)
    started, outer = time.monotonic(), starter()
    if outer is None:
        sys.exit(guarded(lambda: run_ranks(load(sys.argv[2:]), 2, started, (__file__, sys.argv[1]))))
    sys.exit(guarded(lambda: under(outer, load([*sys.argv[2:], f"seed={outer.rank}"]), started, stand_in)))
