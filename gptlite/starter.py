"""Whether torchrun or srun started this process as one rank of many, and which. No torch here.

Their variables say where a process is among the others, as a file descriptor or a host name would; what is trained
comes from the configuration alone.
"""

import os
import re
import signal
import time
from dataclasses import dataclass

from gptlite.errors import ConfigError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_JOB_ID")
LAST_WORD_SECONDS = 5  # that rank 0 has for its line on a refusal, before the others end


@dataclass(frozen=True)
class Starter:
    """What started this rank, its place in the world and on its machine, and where rank 0 listens."""

    name: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """The variables torchrun sets, which torch.distributed reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def starter() -> Starter | None:
    """None where a person or a script started this process alone. Raises ConfigError for a damaged environment."""
    env = os.environ
    if all(name in env for name in TORCHRUN):
        world = _number("WORLD_SIZE")
        return Starter(
            "torchrun",
            _number("RANK"),
            world,
            _number("LOCAL_RANK"),
            _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else world,
            env["MASTER_ADDR"],
            _number("MASTER_PORT"),
        )
    if all(name in env for name in SRUN) and _number("SLURM_NTASKS") > 1:
        return _of_srun()
    return None


def is_main() -> bool:
    """Whether this process speaks for the others: rank 0, or the only one."""
    try:
        found = starter()
    except ConfigError:
        return True
    return found is None or found.rank == 0


def refuse_sweep() -> None:
    """Raises ConfigError where torchrun or srun started this process: a sweep starts the ranks of its jobs itself."""
    if found := starter():
        raise ConfigError(
            f"--multirun under {found.name}: each of its {found.world_size} ranks would run the whole sweep; "
            f"start it once, without {found.name}: every job starts its own ranks"
        )


def let_main_speak() -> None:
    """On a rank above 0 that is refused, as all are: waits until rank 0 has printed its line.

    torchrun and srun end the others once the first has failed. This one then still ends with its own exit code.
    """
    over = False

    def wake(*_: object) -> None:
        nonlocal over
        over = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wake)
    deadline = time.monotonic() + LAST_WORD_SECONDS
    while not over and time.monotonic() < deadline:
        time.sleep(0.05)


def _of_srun() -> Starter:
    env = os.environ
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    local = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "")
    node = _number("SLURM_NODEID") if "SLURM_NODEID" in env else 0
    world = _number("SLURM_NTASKS")
    alone = node < len(local) and local[node] == world
    # Below the ports that systems give out by themselves, and another for each step of a job.
    port = 15000 + (_number("SLURM_JOB_ID") * 8 + _number("SLURM_STEP_ID")) % 15000
    return Starter(
        "srun",
        _number("SLURM_PROCID"),
        world,
        _number("SLURM_LOCALID"),
        local[node] if node < len(local) else 1,
        env.get("MASTER_ADDR") or ("localhost" if alone else first_host(nodes)),
        _number("MASTER_PORT") if "MASTER_PORT" in env else port,
    )


def first_host(nodes: str) -> str:
    """`node03` of Slurm's `node[03-06,09],gpu1`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _tasks_per_node(text: str) -> list[int]:
    """[4, 4, 3] of Slurm's `4(x2),3`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(f"the environment's {name}={os.environ[name]} is not a number; unset it") from None
