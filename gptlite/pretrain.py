"""Pretraining from a configuration, in execution order. Read this file first."""

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

from gptlite.config.schema import Config, require_config
from gptlite.errors import without_exit
from gptlite.parallelism.mesh import build_mesh
from gptlite.progress import working
from gptlite.trainer.attached import NOTHING, Attached
from gptlite.trainer.banner import announce
from gptlite.trainer.build import build_run
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.result import Result
from gptlite.trainer.signals import StopSignal
from gptlite.trainer.summary import conclude
from gptlite.trainer.trainer import Settings, Surroundings, Trainer


@without_exit()
def pretrain(
    config: Config,
    started: float | None = None,
    stop_signal: StopSignal | None = None,
    opened: Callable[[Path], None] | None = None,
    attached: Attached = NOTHING,
) -> Result:
    """Train, and return how the run ended. If it diverges, return a result with exit code 1.

    All ranks call this after joining the process group; a single rank needs no group. `started` is the time.monotonic()
    at which the command began, by default now. With `stop_signal=StopSignal()`, a signal such as SIGTERM makes the run
    save a checkpoint and stop; by default signals are not handled. `opened` is called with the path of the run folder
    once it exists. Raises ConfigError for a configuration that cannot run here, before writing to the run folder (the
    server of an experiment tracker may still refuse the run later).

    A run is the same without `attached`, but nothing observes it. The function `gptlite.pretrain` of the Python API
    attaches what comes with gptlite (gptlite/start/pretrain.py).
    """
    require_config(config)
    started = time.monotonic() if started is None else started
    mesh = build_mesh(config.parallelism)
    with closing(attached.watch(mesh, config.parallelism.timeout_seconds)) as watch:
        folder = RunFolder(config, mesh)
        with working("building the model and opening the data", folder.log if mesh.is_main else lambda _: None):
            run = build_run(config, mesh, folder.log)
        folder.config = config = run.config  # now with the vocabulary size and the number of steps
        state = run.state
        with closing(state.loader):
            if not attached.recall(run, folder):
                folder.restore(state)
            if folder.complete(state):
                return Result.read(folder.path, 0)
            folder.check_space(state, run.data.tokenizer)  # after restoring, before anything is written

            with folder.opened(config, run.data.tokenizer), closing(watch):  # before the last save is awaited
                if opened is not None:
                    opened(folder.path)
                reporter = announce(run, folder, attached)
                settings = Settings(config.trainer, config.optimizer, config.checkpoint)
                with (
                    conclude(config, folder, state, reporter, started, watch) as conclusion,
                    stop_signal or nullcontext(StopSignal()) as stop,
                ):
                    around = Surroundings(reporter, folder, stop, watch, started, attached.execute(run, folder.log))
                    conclusion.outcome = Trainer(state, run.passes, settings, around).run()
                return Result.of(folder.path, conclusion.exit_code, conclusion.result)
