"""Attachments of a run, from its start: the watch over its ranks, its observers, and a line of its banner."""

from collections.abc import Callable
from dataclasses import dataclass

from gptlite.metrics.meter import Throughput
from gptlite.parallelism.mesh import Mesh
from gptlite.progress import Log
from gptlite.trainer.build import Run
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.observers import Observer, Unwatched, Watch
from gptlite.trainer.step import Execute


@dataclass(frozen=True)
class Attached:
    """Attachments that the start of a run gives it. Without any of them, the run trains the same. Equal on all ranks.

    `memory` is the banner's line on the memory that a planner has predicted. `watch(mesh, limit)` returns a watch over
    the ranks, where `limit` is the time limit of a collective in seconds. `observers(run, folder, throughput)` returns
    the run's observers. `execute(run, log)` returns the `execute` of its Step. `recall(run, folder)` restores the state
    without the folder's checkpoint, or returns False. All ranks call these functions, so they may call a collective.
    """

    memory: str = ""
    watch: Callable[[Mesh, float], Watch] = lambda mesh, limit: Unwatched()
    observers: Callable[[Run, RunFolder, Throughput], tuple[Observer, ...]] = lambda run, folder, throughput: ()
    execute: Callable[[Run, Log], Execute | None] = lambda run, log: None
    recall: Callable[[Run, RunFolder], bool] = lambda run, folder: False


NOTHING = Attached()
