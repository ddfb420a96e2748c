"""`pretrain` of the Python API, and of each rank of a run: training, with what observes a run attached."""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gptlite.config.schema import Config, require_config
from gptlite.metrics.meter import Throughput
from gptlite.parallelism.config import Offload
from gptlite.parallelism.mesh import Mesh
from gptlite.pretrain import pretrain as train
from gptlite.satellites.compressed.words import compression_words
from gptlite.satellites.deterministic.words import deterministic_words
from gptlite.satellites.elastic.attendance import Attendance
from gptlite.satellites.elastic.divergence import GoingBack, RestoringCheck
from gptlite.satellites.elastic.goodput import Goodput
from gptlite.satellites.elastic.memory import MemoryCheckpoints, drop, memory_checkpoints
from gptlite.satellites.elastic.shelf import Shelf
from gptlite.satellites.elastic.slow import Departure, SlowNodes
from gptlite.satellites.graph.attach import graph_steps, graph_words
from gptlite.satellites.monitor.garbage import GarbageCollection
from gptlite.satellites.monitor.memory_report import MemoryReport
from gptlite.satellites.monitor.profile import StepProfiler
from gptlite.satellites.monitor.replicas import ReplicaCheck
from gptlite.satellites.monitor.watchdog import watch_ranks
from gptlite.satellites.noise.report import noise_report, noise_words
from gptlite.satellites.onebit.words import onebit_words
from gptlite.satellites.zeropp.words import zeropp_words
from gptlite.torch_private.allocator import set_allocator
from gptlite.trainer.attached import Attached
from gptlite.trainer.build import Run
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.observers import Observer, Watch
from gptlite.trainer.result import Result
from gptlite.trainer.signals import StopSignal

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch's own


def pretrain(
    config: Config,
    started: float | None = None,
    stop_signal: StopSignal | None = None,
    opened: Callable[[Path], None] | None = None,
    memory: str = "",
    shelf: Shelf | None = None,
    attendance: Attendance | None = None,
) -> Result:
    """Train, and return how the run ended. If it diverges, return a result with exit code 1.

    All ranks call this after joining the process group; a single rank needs no group. `started` is the time.monotonic()
    at which the command began, by default now. With `stop_signal=StopSignal()`, a signal such as SIGTERM makes the run
    save a checkpoint and stop; by default signals are not handled. `opened` is called with the path of the run folder
    once it exists. `memory` is the banner's line on the memory that a planner has predicted. `shelf` is host memory
    that outlives this process, for checkpoints in memory, and `attendance` watches over the other ranks of an elastic
    run. Raises ConfigError for a configuration that cannot run here,
    before writing to the run folder (the server of an experiment tracker may still refuse the run later).
    """
    require_config(config)
    grow_segments()
    began, leaving = time.monotonic() if started is None else started, ""
    own = shelf  # or memory of this process, for checkpoints in memory
    while True:
        kept = memory_checkpoints(config, own)
        around = Around(began, shelf, attendance, leaving, kept)
        attached = Attached(memory, around.watched, around.observers, graph_steps, around.recall)
        try:
            return train(config, started, stop_signal, opened, attached)
        except GoingBack as back:  # on all ranks
            mesh, leaving, checked = back.mesh, back.leaving, back.checked
        own = kept.shelf if kept else None
        del around, attached, kept
        mesh.close()
        gc.collect()  # the state of the run, which its exception has held
        if own is not None:
            drop(own, after=checked)
        from gptlite.launch.elastic import going_on  # imports torch's launcher

        config = going_on(config)


def grow_segments() -> None:
    """Let segments of GPU memory grow, so that memory that is free between two tensors can become part of a larger one.

    Nothing changes if this process holds GPU memory already, or if a variable of torch has settings of its allocator.
    """
    if torch.cuda.is_available() and not torch.cuda.memory_reserved() and not any(map(os.getenv, ALLOCATOR_VARIABLES)):
        set_allocator("expandable_segments:True")


@dataclass
class Around:
    """Facts on a run's ranks that its observers need: the start in time.monotonic() seconds, this rank's memory and the
    node that leaves in an elastic run, and the watch over the ranks, once it is built."""

    began: float
    shelf: Shelf | None = None
    attendance: Attendance | None = None
    leaving: str = ""
    kept: MemoryCheckpoints | None = None
    watch: Watch | None = None

    def recall(self, run: Run, folder: RunFolder) -> bool:
        """Restore the state from memory, see `MemoryCheckpoints.recall`."""
        if self.kept is None:
            return False
        reached = None if self.attendance is None else self.attendance.reached
        return self.kept.recall(run, folder) if reached is None else self.kept.recall(run, folder, reached)

    def watched(self, mesh: Mesh, limit: float) -> Watch:
        """Build and keep the watch, see `watch_ranks`."""
        self.watch = watch_ranks(mesh, limit)
        return self.watch if self.attendance is None else self.attendance.watch(self.watch, mesh)

    def observers(self, run: Run, folder: RunFolder, throughput: Throughput) -> tuple[Observer, ...]:
        """Return the observers of a run: the account of its time, the memory of its ranks, the profiler, the comparison
        of replicas, decisions on nodes, the garbage collector, and the noise of gradients if it is measured."""
        trainer, offloads = run.config.trainer, run.config.parallelism.offload is not Offload.none
        lines = [*communication_words(run), graph_words(run), covered(run)]
        for line in filter(None, lines if run.mesh.is_main else ()):
            folder.log(line)
        if self.attendance is not None:
            self.attendance.note(run, folder)
        if self.kept is not None:
            self.kept.excluded = partial(throughput.excluded, "checkpoints")
        node, interval = self.shelf.node if self.shelf else None, trainer.replica_check_interval
        restores = trainer.on_divergence == "restore"
        return (
            Goodput(folder, throughput, self.began),
            MemoryReport(run.mesh, trainer.last_step, throughput.excluded, offloads),
            StepProfiler(trainer.profile_steps, folder.path, run.mesh.rank, folder.log),
            RestoringCheck(folder, run.state.step, node) if restores else ReplicaCheck(interval, node),
            *self._decisions(run, folder),
            GarbageCollection(trainer.gc_freq),
            *([self.kept] if self.kept else []),
            *noise_report(run.state, folder),
        )

    def _decisions(self, run: Run, folder: RunFolder) -> tuple[Observer, ...]:
        """Return the observers that let a node leave an elastic run."""
        if self.shelf is None:
            return ()
        departure, slow = Departure(run.config, run.mesh, self.shelf, folder.log), run.config.cluster.exclude_slow
        if self.leaving:
            departure.ask(self.leaving, "has had wrong copies twice", now=True)
        times = getattr(self.watch, "communication_time", None)  # none with a single rank
        if slow is None or times is None:
            return (departure,)
        return SlowNodes(slow, run.mesh, times, departure), departure


def covered(run: Run) -> str:
    """Return the line of a run's log on its certificate; an empty string if the working directory has none."""
    if not (folder := Path("certificates")).is_dir():
        return ""
    from gptlite.satellites.certify.match import certificate_words  # only with certificates

    return certificate_words(run.config, run.mesh.world_size, folder)


def communication_words(run: Run) -> list[str]:
    """Return the lines that follow the banner, on what ranks send instead of dense gradients and parameters, and on
    what is measured of gradients; none in other runs."""
    config, mesh, passes = run.config, run.mesh, run.state.loader.num_micro_batches
    layout, sizes = config.parallelism, (run.policy.gather_dtype.itemsize, run.policy.reduce_dtype.itemsize)
    compressed = compression_words(layout, mesh, passes)
    optimizer = config.optimizer.completed(config.trainer.max_steps, run.state.schedule.warmup_steps)
    lines = f"compression: {compressed}" if compressed else "", zeropp_words(layout, mesh, passes, sizes)
    more = onebit_words(optimizer, mesh), noise_words(run.state), deterministic_words(layout)
    return [line for line in (*lines, *more) if line]
