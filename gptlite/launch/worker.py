"""One rank of several: the process that train.py starts for it, or the one that torchrun or srun has started."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gptlite.config import Config, from_yaml, to_yaml
from gptlite.errors import ConfigError
from gptlite.files import write_whole
from gptlite.launch.host_memory import lift, limit, limit_words, note_use, out_of_memory, prefer_oom_kill
from gptlite.launch.rank_log import RankLog
from gptlite.launch.starter import Starter

PR_SET_PDEATHSIG = 1  # linux/prctl.h
Pretrain = Callable[..., int]


def main(arguments: list[str], pretrain: Pretrain | None = None) -> NoReturn:
    """The rank that RANK says, started by elastic.run_ranks; `arguments` are a folder, a time and a process id.

    The folder holds config.yaml; the time is when the command began, in time.monotonic() seconds; the process is the
    launcher, which this one does not outlive. Ends with exit code 0 once there is a verdict, which `result-N.json`
    holds: the exit code of the run, or why it was refused. Anything else is a failure, and the launcher ends the other
    ranks. `pretrain` is what ranks do, by default gptlite.pretrain's.
    """
    folder, started, launcher = Path(arguments[0]), float(arguments[1]), int(arguments[2])
    die_with(launcher)
    prefer_oom_kill()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until there is someone to ask what it means
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = RankLog(folder / f"rank-{rank}.log", rank) if rank else None
    faulthandler.enable()

    def conclude(**result: object) -> None:
        write_whole(folder / f"result-{rank}.json", json.dumps(result))

    config = None
    try:
        from gptlite.launch.launcher import keep_freed_memory, share_cores

        keep_freed_memory()  # first: torch asks for huge pages as it did at its first tensor, which imports make
        from gptlite.launch.rank_stop import LauncherStop
        from gptlite.parallelism.process_group import leave

        stop = LauncherStop(folder.parent / "stop", launcher, lambda code: conclude(exit_code=code))
        share_cores(world)
        config = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
        if config.trainer.host_memory_limit is not None:
            note_use(folder / f"memory-{rank}")
        conclude(exit_code=train_rank(config, started, stop, log, pretrain))
        leave()
    except ConfigError as error:
        conclude(refused=str(error))
        end(0)
    except KeyboardInterrupt:  # the request to stop, before there was anything to save
        end(0)
    except BaseException as error:
        reason = out_of_memory(error)
        lift()
        if reason:
            conclude(out_of_memory=reason + limit_words(config.trainer.host_memory_limit if config else None))
        note_failure(error)
        if log:  # rank 0's terminal gets the launcher's words, and of the rank that failed first
            traceback.print_exception(error)
        end(1)
    sys.exit(0)


def under(starter: Starter, config: Config, started: float, pretrain: Pretrain | None = None) -> int:
    """Runs the rank that torchrun or srun made of this process; returns its exit code. Raises ConfigError on all.

    `config` is this rank's own reading; rank 0's is what runs, since folders are named by the time.
    """
    from gptlite.launch.launcher import keep_freed_memory, ran_out, share_cores

    keep_freed_memory()  # first, as in main
    from gptlite.parallelism.process_group import leave
    from gptlite.trainer.signals import StopSignal

    os.environ.update(starter.environment())
    log = None
    if starter.rank:
        handle, name = tempfile.mkstemp(prefix=f"gptlite-rank-{starter.rank}-", suffix=".log")
        os.close(handle)
        log = RankLog(Path(name), starter.rank)
    if starter.name == "srun":
        share_cores(starter.local_world_size)
    try:
        code = train_rank(config, started, StopSignal(), log, pretrain, starter)
        leave()  # not after a failure: the others may be gone, and this would wait for them
        return code
    except ConfigError:
        if log:
            log.path.unlink()
        raise
    except Exception as error:
        note_failure(error)
        if reason := out_of_memory(error):
            lift()
            return ran_out(f"rank {starter.rank}: {reason}", config, starter.world_size)
        if log:
            log.tell(f"rank {starter.rank} failed: {type(error).__name__}: {error}; its output is in {log.path}")
        raise


def train_rank(
    config: Config,
    started: float,
    stop: object,
    log: RankLog | None,
    pretrain: Pretrain | None = None,
    node: Starter | None = None,
) -> int:
    """Joins the process group and trains; returns the exit code. `node`: torchrun or srun started this rank, which
    takes the configuration from rank 0 and, first on a machine without rank 0, prints where output goes."""
    from gptlite.parallelism.process_group import broadcast_text, join

    if pretrain is None:
        from gptlite.pretrain import pretrain
    if int(os.environ["WORLD_SIZE"]) > 1:  # one rank has nobody to talk to
        join(config.parallelism.timeout_seconds)
    limit(config.trainer.host_memory_limit)
    if node:
        config = from_yaml(broadcast_text(to_yaml(config)))

    def opened(run_dir: Path) -> None:
        assert log is not None
        log.move(run_dir)
        if node and node.local_rank == 0:
            last = node.rank + node.local_world_size - 1
            log.tell(
                f"ranks {node.rank} to {last} of {node.world_size} train here; their output is in {log.path.parent}"
            )

    return pretrain(config, started, stop, opened if log else None)


def die_with(launcher: int) -> None:
    """Has this process killed when its launcher ends, however that ends."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it was quicker
        os._exit(1)


def note_failure(error: BaseException) -> None:
    """Writes an exception with its traceback where the elastic agent looks for it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with contextlib.suppress(OSError):
        get_error_handler().record_exception(error)


def end(code: int) -> NoReturn:
    """Ends the process at once: its threads and its process group may be waiting for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
