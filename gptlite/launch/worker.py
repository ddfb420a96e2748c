"""Entry points of a rank that train.py, torchrun or srun has started."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn, TypeVar

from gptlite.config.saved import from_yaml, to_yaml
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, is_of_a_file, one_line, printable, system_error
from gptlite.files import write_whole
from gptlite.invocation import prepare_process
from gptlite.launch.host_memory import lift, limit, limit_words, note_use, out_of_memory, prefer_oom_kill
from gptlite.launch.rank_log import RankLog
from gptlite.launch.starter import UNNAMED, Starter
from gptlite.progress import working

MEMORY = "memory.txt"  # the banner's words on memory, in the folder of the launcher and its ranks
PR_SET_PDEATHSIG = 1  # linux/prctl.h
T = TypeVar("T")


def main(arguments: list[str], pretrain: Callable[..., int]) -> NoReturn:
    """Run the rank given by the variable RANK. `arguments` are a folder, a time and a process id.

    The folder has config.yaml. The time is the start of the command in time.monotonic() seconds. The process is the
    launcher (elastic.run_ranks); when it ends, this process ends too. The rank exits with 0 once `result-N.json` has
    the run's exit code or the reason of a refusal. Any other end is a failure, after which the launcher stops the other
    ranks. `pretrain` is the function to run, which returns the exit code.
    """
    prepare_process()
    folder, started, launcher = Path(arguments[0]), float(arguments[1]), int(arguments[2])
    die_with(launcher)
    prefer_oom_kill()  # the launcher must survive to report the failure
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until LauncherStop installs its handler
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = RankLog(folder / f"rank-{rank}.log", rank) if rank else None
    faulthandler.enable()

    def conclude(**result: object) -> None:
        write_whole(folder / f"result-{rank}.json", json.dumps(result))

    config = None
    try:
        with nullcontext() if log else working(f"starting {world} ranks", print):
            from gptlite.launch.process import keep_freed_memory, share_cores

            keep_freed_memory()  # before the imports below create tensors: torch reads its huge page setting only once
            from gptlite.launch.rank_stop import LauncherStop
            from gptlite.parallelism.process_group import leave_group

            stop = LauncherStop(folder.parent / "stop", launcher, lambda code: conclude(exit_code=code))
            share_cores(world)
        config = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"), imports=True)
        if config.trainer.host_memory_limit is not None:
            note_use(folder / f"memory-{rank}")
        conclude(exit_code=train_rank(config, started, stop, log, pretrain))
        leave_group()
    except ConfigError as error:
        conclude(refused=str(error))
        end(0)
    except KeyboardInterrupt:  # a stop request before training; LauncherStop has written the result
        end(0)
    except BaseException as error:
        reason = out_of_memory(error)
        lift()  # writing the report needs memory
        if reason:
            conclude(out_of_memory=reason + limit_words(config.trainer.host_memory_limit if config else None))
        note_failure(error)
        if log:  # rank 0 prints to the terminal, where the launcher reports the rank that failed first
            traceback.print_exception(error)
        end(1)
    sys.exit(0)


def under(
    starter: Starter,
    config: Config,
    started: float,
    pretrain: Callable[..., T],
    advise: Callable[[], Iterable[str]] = tuple,
) -> T:
    """Run this process as a rank of torchrun or srun, and return the result of `pretrain`.

    Each rank composes a `config`, but all use rank 0's, since folder names contain the time. `advise()` returns lines
    that are printed if the rank runs out of memory. Raises ConfigError on all ranks if the run is refused.
    """
    from gptlite.launch.process import keep_freed_memory, ran_out, share_cores

    keep_freed_memory()  # first, as in main
    from gptlite.parallelism.process_group import leave_group
    from gptlite.trainer.signals import StopSignal

    names = starter.variables()
    os.environ.update(starter.environment())  # torch.distributed reads these variables, which srun does not set
    log = None
    if starter.rank:
        handle, name = tempfile.mkstemp(prefix=f"gptlite-rank-{starter.rank}-", suffix=".log")
        os.close(handle)
        log = RankLog(Path(name), starter.rank)
    if starter.name == "srun":  # torchrun sets OMP_NUM_THREADS itself
        share_cores(starter.local_world_size)
    try:
        result = train_rank(config, started, StopSignal(), log, pretrain, starter, names)
        leave_group()  # only after success, as it would wait for ranks that have ended
        return result
    except ConfigError:
        if log:
            log.path.unlink()  # a refused run must leave no files
        raise
    except Exception as error:
        note_failure(error)
        if reason := out_of_memory(error):
            lift()
            sys.exit(ran_out(f"rank {starter.rank}: {reason}", config, advise()))
        if log:
            log.tell(f"rank {starter.rank} failed: {one_line(error)}; its output is in {log.path}")
        raise


def train_rank(
    config: Config,
    started: float,
    stop: object,
    log: RankLog | None,
    pretrain: Callable[..., T],
    node: Starter | None = None,
    names: Sequence[str] = (),
) -> T:
    """Join the process group, train, and return the result of `pretrain`.

    `node` is set if torchrun or srun started this rank, by the environment variables `names`. Then the configuration
    comes from rank 0, and the first rank of each machine other than rank 0's prints the folder of the logs.
    """
    from gptlite.parallelism.collectives import broadcast_text

    if int(os.environ["WORLD_SIZE"]) > 1:  # a single rank needs no process group
        _meet(config.parallelism.timeout_seconds, log, node, names)
    limit(config.trainer.host_memory_limit)
    if node:
        config = from_yaml(broadcast_text(to_yaml(config)), "rank 0's configuration")

    def opened(run_dir: Path) -> None:
        assert log is not None
        log.move(run_dir)
        if node and node.local_rank == 0:
            last = node.rank + node.local_world_size - 1
            log.tell(
                f"ranks {node.rank} to {last} of {node.world_size} train here; their output is in {log.path.parent}"
            )

    return pretrain(config, started, stop, opened if log else None)


def _meet(timeout_seconds: float, log: RankLog | None, node: Starter | None, names: Sequence[str]) -> None:
    """Join the process group. Under another launcher, the first rank of each machine tells why that takes long or
    fails."""
    from gptlite.launch.meeting import meeting
    from gptlite.parallelism.process_group import join

    if node is None:
        return join(timeout_seconds)

    def tell(text: str) -> None:
        if log and node.local_rank == 0:
            log.tell(text)
        elif not log:
            print(printable(text), file=sys.stderr, flush=True)

    try:
        with meeting(node, names, timeout_seconds, tell):
            join(timeout_seconds, claim=node.name == UNNAMED)
    except ConfigError as error:
        if log:  # rank 0 prints the errors that it has itself
            tell(f"error: {error}")
        raise


def die_with(launcher: int) -> None:
    """Have the kernel kill this process when its launcher ends for any reason."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launcher ended before prctl took effect
        os._exit(1)


def note_failure(error: BaseException) -> None:
    """Write the exception that is being handled, with its traceback, to the file that the elastic agent reads."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if isinstance(error, OSError) and is_of_a_file(error):
        error = OSError(system_error(error))
    try:
        str(error)
    except (Exception, SystemExit):
        error = RuntimeError(one_line(error))  # the traceback is that of the exception being handled
    with contextlib.suppress(OSError):
        get_error_handler().record_exception(error)


def end(code: int) -> NoReturn:
    """End the process without cleanup, since its threads and process group may be waiting for ranks that have ended."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
