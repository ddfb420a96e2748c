"""Pretraining from a configuration, in the order it happens. Read this file first."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from gptlite.config import Config, with_vocabulary
from gptlite.data.build import build_loader, prepare
from gptlite.model.gpt import GPT
from gptlite.model.init import init_weights
from gptlite.model.parallelize import build_passes, copy_weights, materialize, parallelize
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.fused import writes_copies
from gptlite.optimizer.rounded import round_steps
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.streamed import offload_state
from gptlite.parallelism.chain import Chain
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.watchdog import Watch
from gptlite.parallelism.zero import home
from gptlite.precision import resolve_precision
from gptlite.run_folder import RunFolder
from gptlite.summary import announce, conclude
from gptlite.trainer.loop import Settings, train
from gptlite.trainer.loss_scale import build_scaler
from gptlite.trainer.ops import agreed_ops
from gptlite.trainer.signals import StopSignal
from gptlite.trainer.spike import build_spike_watch
from gptlite.trainer.state import TrainState
from gptlite.warm_start import refuse_larger_vocabulary


def pretrain(
    config: Config,
    started: float | None = None,
    stop_signal: StopSignal | None = None,
    opened: Callable[[Path], None] | None = None,
) -> int:
    """Trains, and returns the exit code: 0 done, 1 diverged, 128 + signal stopped.

    To be called by every rank, the process group joined. `started` is when the command began, in time.monotonic()
    seconds; by default now. `stop_signal` is how a rank hears a request to stop, and `opened` is told the run folder
    once it stands. Raises ConfigError for what cannot run here, before the run folder is written to (a tracker's server
    may refuse later).
    """
    started = time.monotonic() if started is None else started
    mesh = build_mesh(config.parallelism)
    watch = Watch(mesh, config.parallelism.timeout_seconds)
    policy = resolve_precision(config.precision, mesh.device)
    ops = agreed_ops(config.ops, mesh, documents=config.data.documents)
    run = RunFolder(config, mesh)
    data = prepare(config.data, config.seed, run.log, mesh)
    refuse_larger_vocabulary(config, data.tokenizer.vocab_size)
    config = with_vocabulary(config, data.tokenizer.vocab_size)

    with torch.device("meta"):
        model = GPT(config.model, ops, config.seed)
    parts = parallelize(model, mesh, config.parallelism, policy, compile=config.trainer.compile)
    materialize(parts, home(mesh, config.parallelism))
    for part in parts:
        init_weights(part, config.model, config.seed)
    weights = [named for part in parts for named in part.named_weights()]
    optimizer = build_optimizer(config.optimizer, weights, ops.adamw, config.model.num_heads)
    if not policy.master_weights:
        optimizer = round_steps(optimizer, config.seed)
    optimizer = offload_state(optimizer, config.parallelism, mesh)
    if ops.weight_copies and writes_copies(optimizer) and not config.trainer.compile:
        copy_weights(parts, mesh, policy)
    loader = build_loader(config.data, data, mesh, config.seed, config.parallelism)
    schedule = Schedule(config.schedule, config.trainer.max_steps)
    chain = Chain(parts, mesh, config.parallelism)
    scaler = build_scaler(config.precision, policy)
    spikes = build_spike_watch(config.trainer.spike)
    state = TrainState(chain, optimizer, schedule, loader, data.identity, scaler=scaler, spikes=spikes)
    passes = build_passes(
        chain,
        config.parallelism,
        micro_batches=loader.num_micro_batches,
        micro_batch_size=loader.micro_batch_size,
        sequence_length=config.data.sequence_length,
    )
    run.restore(state)
    run.check_space(state)

    with run.opened(config, data.tokenizer), closing(loader), closing(watch):
        if opened is not None:
            opened(run.path)
        reporter = announce(config, run, mesh, state, data, policy, ops)
        settings = Settings(config.trainer, config.optimizer, config.checkpoint)
        with conclude(config, run, state, reporter, started, watch) as conclusion, stop_signal or StopSignal() as stop:
            conclusion.outcome = train(state, passes, mesh, settings, reporter, run, stop, watch, started, run.path)
        return conclusion.exit_code
