"""Ranks on this machine that are started once and run many functions, over gloo, in groups of any smaller size.

    with RankPool(8) as ranks:
        results = ranks.run(4, function, *arguments, timeout=60)   # function(*arguments) on the first four

The processes are forked from a server that has imported torch, so that new ones take a tenth of a second. A function
that fails or does not end costs its processes: they are killed, and the next call starts others.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from gptlite.launch.worker import die_with
from gptlite.torch_private.distributed import forget_meshes

FORKING = multiprocessing.get_context("forkserver")
PRELOADED = ["gptlite.satellites.certify.fuzz.run", "torch.distributed.tensor.debug", "torch.distributed._tools"]
GRACE = 3.0  # seconds that the other ranks get to fail by themselves after the first one


class RankError(RuntimeError):
    """The first rank that raised an exception, with the traceback. `error` is its last line."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank, self.error = rank, (text.strip().splitlines() or [""])[-1]


class RankPool:
    """Up to `most` processes, started by the first call that needs them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._store: Any = None
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]:
        """Return `function(*arguments)` of each of the first `world` ranks, which are a process group meanwhile.

        Raises RankError for the first rank that raises, and TimeoutError with the ranks that are not done after
        `timeout` seconds. Then no process is left.
        """
        if not 1 <= world <= self.most:
            raise ValueError(f"world={world} must be from 1 to {self.most}")
        name = uuid.uuid4().hex
        try:
            for rank in range(len(self._ranks), world):
                self._ranks.append(self._started(rank))
            for _, pipe in self._ranks[:world]:
                pipe.send((function, arguments, world, name))
            return self._collected(world, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def _started(self, rank: int) -> tuple[BaseProcess, Connection]:
        if self._store is None:  # held here: no port is guessed, and no rank's end closes it
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ours, theirs = FORKING.Pipe()
        process = FORKING.Process(target=_serve, args=(theirs, rank, self._store.port), daemon=True)
        FORKING.set_forkserver_preload(PRELOADED)
        # The server reads its variables when it starts. Ranks need not import the program again.
        main = patch.dict(sys.modules, {"__main__": ModuleType("__main__")})
        with main, patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return process, ours

    def _collected(self, world: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        deadline = time.monotonic() + timeout
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:world])}
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                rank = pipes.pop(pipe)  # type: ignore[call-overload]
                try:
                    succeeded, value, when = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):  # before any error: those of the others may follow from it
                    self._ranks[rank][0].join(GRACE)
                    succeeded, when = False, 0.0
                    value = f"its process ended with status {self._ranks[rank][0].exitcode}"
                if succeeded:
                    results[rank] = value
                else:
                    failures.append((when, rank, value))
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            _, rank, text = min(failures)
            raise RankError(rank, text)
        if pipes:
            raise TimeoutError(f"ranks {sorted(pipes.values())} of {world} are not done after {timeout:g} s")
        return [results[rank] for rank in range(world)]


def _serve(pipe: Connection, rank: int, port: int) -> None:
    """Run what the pipe says until it closes."""
    die_with(os.getppid())  # the server, which ends with the program
    torch.set_num_threads(1)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    os.environ.update({"CUDA_VISIBLE_DEVICES": ""} | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}))
    null = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):  # gloo and torch's warnings write there, and results come by the pipe
        os.dup2(null, standard)
    while True:
        try:
            function, arguments, world, name = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_result(function, arguments, joined(rank, world, port, name)))


def _result(
    function: Callable[..., Any], arguments: tuple[Any, ...], group: AbstractContextManager[None]
) -> tuple[bool, Any, float]:
    """Return whether a function succeeds, its value or traceback, and the time, taken before the group is left."""
    try:
        with group:
            try:
                return True, function(*arguments), time.time()
            except BaseException:
                failed = False, traceback.format_exc(), time.time()
        return failed
    except BaseException:  # of the group itself
        return False, traceback.format_exc(), time.time()


@contextmanager
def joined(rank: int, world: int, port: int, name: str) -> Iterator[None]:
    """Context manager for a gloo group of `world` ranks, none for one; `name` is one that no group has had."""
    if world == 1:
        yield
        if dist.is_initialized():  # the group of one rank that offloads
            dist.destroy_process_group()
        return
    store = PrefixStore(name, TCPStore("localhost", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=240))
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()
