"""Entry points of an elastic run's workers, keeper and ranks."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gptlite.satellites.elastic.proxy import go_on, with_keeper
from gptlite.start.rank import KEEPER

if TYPE_CHECKING:
    from gptlite.config.schema import Config
    from gptlite.satellites.elastic.shelf import Shelf


def work(arguments: list[str]) -> NoReturn:
    """Stand for a rank of our launcher. The arguments are those of launch/worker.py: a folder, a time, the launcher."""
    go_on(arguments)
    with_keeper(KEEPER, Path(arguments[0], "config.yaml").read_text, arguments)


def keep(arguments: list[str]) -> None:
    """Keep the ranks of this node. The arguments are a folder, a descriptor with a lock and the launcher; standard
    input is the configuration."""
    from gptlite.invocation import prepare_process
    from gptlite.launch.process import keep_freed_memory

    prepare_process()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()  # before the imports below create tensors
    text = sys.stdin.read()
    from gptlite.config.saved import from_yaml
    from gptlite.satellites.elastic.keeper import Keeper

    config = from_yaml(text, imports=True)
    threads = prepared(config)
    folder, lock, launcher = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    Keeper(folder, launcher, config.checkpoint.replicas, partial(serve, text, threads)).run(lock)
    os._exit(0)  # at once: torch takes seconds to unload


def prepared(config: Config) -> int:
    """Import what ranks need, so that forked ones have it. Return torch's number of threads, which ranks are to set.

    Neither threads nor CUDA must be in use when ranks are forked.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("gptlite.satellites.elastic.rank", "gptlite.start.pretrain"):
        import_module(name)
    from gptlite.parallelism.mesh import Mesh
    from gptlite.trainer.parts import agreed_ops

    if not torch.cuda.device_count():  # loads the kernels
        agreed_ops(config.ops, Mesh(torch.device("cpu")), documents=config.data.documents)
    gc.collect()
    gc.freeze()  # half a million objects, which each rank would collect again when it leaves a world
    return threads


def serve(text: str, threads: int, control: socket.socket, shelf: Shelf, pulse: int) -> NoReturn:
    """Run a forked rank."""
    import faulthandler

    import torch

    from gptlite.launch.host_memory import prefer_oom_kill
    from gptlite.satellites.elastic.rank import RankRun
    from gptlite.satellites.elastic.rank import serve as serve_rank

    torch.set_num_threads(threads)
    faulthandler.enable()
    prefer_oom_kill()
    serve_rank(control, shelf, pulse, RankRun(train, predict), text)


def predict(config: Config, folder: Path | None, ranks: int) -> str:
    """Return the banner's words on the memory of the largest layout on at most `ranks` ranks, before they meet.

    `folder` is that of our launcher, which has predicted them, None under torchrun.
    """
    from gptlite.launch.worker import MEMORY
    from gptlite.satellites.elastic.degree import largest
    from gptlite.start.run import predicted

    if folder is not None:
        return (folder / MEMORY).read_text(encoding="utf-8")
    world = largest(config, ranks)
    return predicted(config, world) if world else ""


def train(folder: Path | None, config: Config, *arguments: Any, **more: Any) -> int:
    """Train in a world, and return the exit code. `folder` is that of our launcher, None under torchrun."""
    import torch.distributed as dist

    from gptlite.start.pretrain import pretrain
    from gptlite.start.run import drawn

    result = pretrain(config, *arguments, **more)
    main = not dist.is_initialized() or dist.get_rank() == 0
    if folder is None and main and result.exit_code == 0:
        drawn(result.folder, 0)
    return result.exit_code
