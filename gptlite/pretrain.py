"""Pretraining from a configuration, in execution order. Read this file first."""

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

from gptlite.config import Config, require_config
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.watchdog import Watch
from gptlite.run.banner import announce
from gptlite.run.build import build_run
from gptlite.run.folder import RunFolder
from gptlite.run.result import Result
from gptlite.run.summary import conclude
from gptlite.trainer.loop import Settings, train
from gptlite.trainer.signals import StopSignal


def pretrain(
    config: Config,
    started: float | None = None,
    stop_signal: StopSignal | None = None,
    opened: Callable[[Path], None] | None = None,
) -> Result:
    """Train, and return how the run ended. A run that diverges is a result too, with exit code 1.

    Every rank calls this after joining the process group; a single rank needs none. `started` is when the command
    began, in time.monotonic() seconds; by default now. `stop_signal` receives stop requests: with StopSignal() a signal
    saves and stops, and by default no signal is handled. `opened` is called with the run folder once it exists. Raises
    ConfigError for a configuration that cannot run here, before the run folder is written to (a tracker's server may
    refuse later).
    """
    require_config(config)
    started = time.monotonic() if started is None else started
    mesh = build_mesh(config.parallelism)
    watch = Watch(mesh, config.parallelism.timeout_seconds)
    folder = RunFolder(config, mesh)
    run = build_run(config, mesh, folder.log)
    folder.config = config = run.config  # now with the vocabulary size and the number of steps
    state = run.state
    folder.restore(state)
    if folder.complete(state):
        state.loader.close()
        watch.close()
        return Result.read(folder.path, 0)
    folder.check_space(state)  # after restoring, and before the folder is written

    with folder.opened(config, run.data.tokenizer), closing(state.loader), closing(watch):
        if opened is not None:
            opened(folder.path)
        reporter = announce(run, folder)
        settings = Settings(config.trainer, config.optimizer, config.checkpoint)
        with (
            conclude(config, folder, state, reporter, started, watch) as conclusion,
            stop_signal or nullcontext(StopSignal()) as stop,
        ):
            conclusion.outcome = train(state, run.passes, settings, reporter, folder, stop, watch, started)
        return Result.of(folder.path, conclusion.exit_code, conclusion.result)
