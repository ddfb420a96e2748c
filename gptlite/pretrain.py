"""Pretraining from a configuration, in the order it happens. Read this file first."""

import time
from contextlib import closing

import torch

from gptlite.config import Config, with_vocabulary
from gptlite.data.build import build_loader, prepare
from gptlite.model.gpt import GPT
from gptlite.model.init import init_weights
from gptlite.model.parallelize import materialize, parallelize
from gptlite.ops.select import select_ops
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.schedule import Schedule
from gptlite.parallelism.mesh import build_mesh
from gptlite.precision import resolve_precision
from gptlite.run_folder import RunFolder
from gptlite.summary import announce, conclude
from gptlite.trainer.loop import Settings, train
from gptlite.trainer.signals import StopSignal
from gptlite.trainer.state import TrainState


def pretrain(config: Config, started: float | None = None) -> int:
    """Trains, and returns the exit code: 0 done, 1 diverged, 128 + signal stopped.

    `started` is when the command began, in time.monotonic() seconds; by default now. Raises ConfigError for what
    cannot run here, before the run folder is written to (a tracker's server may refuse later).
    """
    started = time.monotonic() if started is None else started
    mesh = build_mesh(config.parallelism)
    policy = resolve_precision(config.precision, mesh.device)
    ops = select_ops(config.ops, mesh.device)
    run = RunFolder(config)
    data = prepare(config.data, config.seed, run.log)
    config = with_vocabulary(config, data.tokenizer.vocab_size)

    with torch.device("meta"):
        model = GPT(config.model, ops, config.seed)
    parts = parallelize(model, mesh, config.parallelism, policy, compile=config.trainer.compile)
    materialize(parts, mesh.device)
    for part in parts:
        init_weights(part, config.model, config.seed)
    optimizer = build_optimizer(config.optimizer, [named for part in parts for named in part.named_parameters()])
    loader = build_loader(config.data, data, mesh, config.seed)
    schedule = Schedule(config.schedule, config.trainer.max_steps)
    state = TrainState(parts, optimizer, schedule, loader, data.identity)
    run.restore(state)

    with run.opened(config, data.tokenizer), closing(loader):
        reporter = announce(config, run, mesh, state, data, policy, ops)
        settings = Settings(config.trainer, config.data, config.optimizer, config.checkpoint)
        with conclude(config, run, state, reporter, started) as conclusion, StopSignal() as stop:
            conclusion.outcome = train(
                state, mesh, settings, reporter, lambda: run.save(state), stop, started, run.path
            )
        return conclusion.exit_code
