"""Detection of torchrun and srun from the environment. Does not import torch.

Their variables determine only the rank of a process and the connection to the other ranks. The training configuration
never depends on the environment.
"""

import os
import re
import signal
import threading
from dataclasses import astuple, dataclass

from gptlite.errors import ConfigError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_JOB_ID")
STEP_TASKS = "SLURM_STEP_NUM_TASKS"
UNNAMED = "RANK and WORLD_SIZE"  # launcher that sets these variables, but not LOCAL_RANK
LAST_WORD_SECONDS = 5  # time for rank 0 to print an error before the other ranks end


@dataclass(frozen=True)
class Starter:
    """Launcher of this rank (torchrun or srun), the rank's place in the world and on its machine, rank 0's address."""

    name: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int

    def environment(self) -> dict[str, str]:
        """Return the environment variables that torch.distributed reads, as torchrun sets them."""
        return dict(zip(TORCHRUN, map(str, astuple(self)[1:]), strict=True))

    def variables(self) -> list[str]:
        """Return the names of the environment variables that the launcher, or an earlier one, has set."""
        return [each for each in (SRUN if self.name == "srun" else TORCHRUN) if each in os.environ]


def starter() -> Starter | None:
    """Return this rank's launcher, None if started directly. Raises ConfigError for an invalid environment variable."""
    env = os.environ
    if env.keys() >= {"RANK", "WORLD_SIZE"}:
        rank, world = _number("RANK"), _number("WORLD_SIZE")
        _refuse_place("RANK", rank, "WORLD_SIZE", world)
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]:
            if world == 1:
                return None
            raise ConfigError(
                f"the environment's RANK={rank} and WORLD_SIZE={world} are of a run on several ranks, but "
                f"{' and '.join(missing)} is not set, so they cannot meet; set it, or unset RANK and WORLD_SIZE"
            )
        # Training operators of Kubernetes start one process on each machine, without LOCAL_RANK.
        alone = "LOCAL_RANK" not in env
        local_rank, local_world = (0, 1) if alone else (_number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE", world))
        _refuse_place("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world)
        name = UNNAMED if alone else "torchrun"
        return Starter(name, rank, world, local_rank, local_world, _address(), _port())
    if env.keys() >= set(SRUN) and _number(_slurm_tasks()) != 1:  # a single task starts the ranks of a run itself
        return _of_srun()
    return None


def is_main() -> bool:
    """Return True on rank 0, in a single process, or if the environment is invalid."""
    try:
        found = starter()
    except ConfigError:
        return True
    return found is None or found.rank == 0


def refuse_sweep() -> None:
    """Raise ConfigError under torchrun or srun, since a sweep starts the ranks of its cells itself."""
    if found := starter():
        raise ConfigError(
            f"--multirun under {found.name} would run the whole sweep on each of the {found.world_size} ranks; "
            f"start the sweep once, without {found.name}, as each cell starts separate ranks"
        )


def let_main_speak() -> None:
    """Wait on a refused rank other than 0, so that rank 0 has time to print the error.

    torchrun and srun end the other ranks once the first rank has failed. SIGTERM or SIGINT ends the wait, and the rank
    then exits with its usual code.
    """
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    over.wait(LAST_WORD_SECONDS)


def _of_srun() -> Starter:
    env = os.environ
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    local = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "")
    node, local_rank = _number("SLURM_NODEID", 0), _number("SLURM_LOCALID")
    world = _number(tasks := _slurm_tasks())
    _refuse_place("SLURM_PROCID", _number("SLURM_PROCID"), tasks, world)
    _refuse_place("SLURM_LOCALID", local_rank, tasks, world)
    if node < 0:
        raise ConfigError(f"the environment's SLURM_NODEID={node} is not a machine; set 0 or more, or unset it")
    alone = node < len(local) and local[node] == world
    # Below the ephemeral ports, and different for each step of a job.
    port = 15000 + (_number("SLURM_JOB_ID") * 8 + _number("SLURM_STEP_ID")) % 15000
    return Starter(
        "srun",
        _number("SLURM_PROCID"),
        world,
        local_rank,
        local[node] if node < len(local) else 1,
        env.get("MASTER_ADDR") or ("127.0.0.1" if alone else first_host(nodes)),  # localhost may not resolve
        _port(port),
    )


def _slurm_tasks() -> str:
    """Return the variable with the number of tasks: this step's, if it is set, since the job may have more tasks, as in
    an interactive step."""
    return STEP_TASKS if STEP_TASKS in os.environ else "SLURM_NTASKS"


def _refuse_place(name: str, rank: int, size: str, world: int) -> None:
    """Raise ConfigError for a rank outside its world, which would wait for ranks that never come."""
    if world < 1:
        raise ConfigError(f"the environment's {size}={world} is not a number of ranks; set 1 or more, or unset it")
    if not 0 <= rank < world:
        raise ConfigError(
            f"the environment's {name}={rank} is not from 0 to {world - 1}, below {size}={world}; set it, or unset both"
        )


def first_host(nodes: str) -> str:
    """Return e.g. `node03` for Slurm's `node[03-06,09],gpu1`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _tasks_per_node(text: str) -> list[int]:
    """Return e.g. [4, 4, 3] for Slurm's `4(x2),3`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _port(default: int | None = None) -> int:
    port = _number("MASTER_PORT", default)
    if not 1 <= port <= 65535:
        raise ConfigError(f"the environment's MASTER_PORT={port} is not a port; set 1 to 65535, or unset it")
    return port


def _address() -> str:
    if not (address := os.environ["MASTER_ADDR"]):
        raise ConfigError("the environment's MASTER_ADDR is empty; set it to rank 0's machine, or unset it")
    return address


def _number(name: str, default: int | None = None) -> int:
    if name not in os.environ and default is not None:
        return default
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(
            f"the environment's {name}={os.environ[name]} is not a number; set a whole number, or unset it"
        ) from None
