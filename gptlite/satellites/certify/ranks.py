"""Ranks on this machine, forked from a process that has imported torch: each begins in a tenth of a second.

    ranks = start("gptlite.satellites.certify.tasks:compared", config, world, folder, reference)
    results = ranks.wait()

The forking process computes nothing and has no threads. Ranks are CPU processes with one thread each, over gloo.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gptlite.config.saved import from_yaml, to_yaml
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, one_line

PRELOADED = ["gptlite.satellites.certify.tasks"]
FORKING = multiprocessing.get_context("forkserver")
SECONDS = 600.0  # limit of one run


class RankFailed(RuntimeError):
    """Error of a rank that raised an exception or died; its message is one line. `text` has the traceback."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


class Ranks:
    """Ranks of one run. `held` is the store at which they meet."""

    def __init__(self, processes: list[BaseProcess], folder: Path, held: object) -> None:
        self.processes, self._folder, self._held = processes, folder, held

    def kill(self) -> None:
        """End all ranks at once, as `kill -9`."""
        for each in self.processes:
            each.kill()
        for each in self.processes:
            each.join()

    def wait_any(self, done: Callable[[], bool] = lambda: False) -> None:
        """Wait until a rank has ended or `done()` is true. Raises RankFailed after SECONDS."""
        until = time.monotonic() + SECONDS
        while all(each.exitcode is None for each in self.processes) and not done():
            if time.monotonic() > until:
                self.kill()
                raise RankFailed(f"the ranks have not ended after {SECONDS:.0f} s", self._printed())
            time.sleep(0.005)

    def wait(self) -> list[Any]:
        """Wait until all ranks have ended, and return their results.

        Raises RankFailed for the rank that failed first, after ending the others, and ConfigError if one refused.
        """
        until = time.monotonic() + SECONDS
        while any(each.exitcode is None for each in self.processes):
            if any(each.exitcode for each in self.processes) or time.monotonic() > until:
                break
            time.sleep(0.005)
        ended = [each.exitcode for each in self.processes]
        self.kill()
        results = [self._result(rank) for rank in range(len(ended))]
        if refused := next((result for kind, result, _ in results if kind == "refused"), None):
            raise ConfigError(refused)
        failed = [
            (when, rank, *result.split("\n", 1))
            for rank, (kind, result, when) in enumerate(results)
            if kind == "failed"
        ]
        if failed:
            _, rank, message, text = min(failed)
            raise RankFailed(f"rank {rank} failed: {message}", text)
        if dead := [rank for rank, code in enumerate(ended) if code != 0]:
            words = "did not end" if ended[dead[0]] is None else f"ended with exit code {ended[dead[0]]}"
            raise RankFailed(f"rank {dead[0]} {words}", self._printed())
        return [result for _, result, _ in results]

    def _result(self, rank: int) -> tuple[str, Any, float]:
        file = self._folder / f"result-{rank}"
        return pickle.loads(file.read_bytes()) if file.exists() else ("", None, 0.0)

    def _printed(self) -> str:
        return (self._folder / "output-0").read_text(errors="replace")[-2000:]


def start(task: str, config: Config, folder: Path, *arguments: object) -> Ranks:
    """Start `task(config, *arguments)` on each rank of the layout of `config`, whose data degree is set.

    `task` is MODULE:FUNCTION. Its result is pickled. `folder` receives what ranks print.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    layout = config.parallelism
    world = layout.tensor * layout.pipeline * layout.context * (layout.data or 1)
    own = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))
    env, store = {}, None
    if world > 1:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        env = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
        env["TORCHELASTIC_USE_AGENT_STORE"] = True
    FORKING.set_forkserver_preload(PRELOADED)
    processes = []
    for rank in range(world):
        mine = {key: str(value) for key, value in (env | {"RANK": rank, "LOCAL_RANK": rank} if env else {}).items()}
        process = FORKING.Process(target=_main, args=(str(own), rank, mine, task, to_yaml(config), arguments))
        process.start()
        processes.append(process)
    return Ranks(processes, own, store)


def run(task: str, config: Config, folder: Path, *arguments: object) -> list[Any]:
    """Run a task on the ranks of a configuration, and return the results of the ranks."""
    return start(task, config, folder, *arguments).wait()


def _main(folder: str, rank: int, env: dict[str, str], task: str, config: str, arguments: tuple[object, ...]) -> None:
    from gptlite.launch.worker import die_with

    die_with(os.getppid())
    descriptor = os.open(f"{folder}/output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env, CUDA_VISIBLE_DEVICES="")
    try:
        answer = "done", _run(task, config, arguments, joins=bool(env))
    except ConfigError as error:
        answer = "refused", str(error)
    except BaseException as error:
        answer = "failed", f"{one_line(error)}\n{traceback.format_exc()}"
    file = Path(folder, f"result-{rank}")
    file.with_suffix(".new").write_bytes(pickle.dumps((*answer, time.time())))
    file.with_suffix(".new").rename(file)
    sys.stdout.flush()
    os._exit(answer[0] == "failed")  # threads of a process group may wait for ranks that have ended


def _run(task: str, config: str, arguments: tuple[object, ...], joins: bool) -> Any:
    import torch

    from gptlite.parallelism.process_group import join, leave_group

    torch.set_num_threads(1)
    module, name = task.split(":")
    typed = from_yaml(config, imports=True)
    if joins:
        join(typed.parallelism.timeout_seconds)
    result = getattr(importlib.import_module(module), name)(typed, *arguments)
    leave_group()
    return result
