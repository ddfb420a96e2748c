"""Reduction of a configuration to runs that one machine takes in seconds, and what these do not cover."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gptlite.config.batch import check_world
from gptlite.config.checks import check
from gptlite.config.schema import Config
from gptlite.config.trainer import SpikeConfig, TrainerConfig
from gptlite.data.config import SyntheticConfig
from gptlite.errors import ConfigError
from gptlite.launch.launcher import with_known_vocabulary
from gptlite.metrics.config import LoggerConfig
from gptlite.models.registry import spec_of
from gptlite.parallelism.config import ActivationCheckpointing, Compression, Offload, ParallelismConfig, ZeroppConfig
from gptlite.parallelism.layout import (
    accumulation,
    largest_micro_batch,
    num_stages,
    resolve,
    schedule_refuses,
)
from gptlite.precision import Precision, PrecisionConfig
from gptlite.satellites.certify.shrink import Need, Shrunk, row_counts, shrunk
from gptlite.satellites.certify.worlds import MOST_RANKS, CutAxis, World, axes_of, cover, thirds, world_of
from gptlite.satellites.onebit.configs import exchanges_momenta

STEPS = 10  # of the runs that are killed and resumed
# Largest learning rate. Adam moves an element whose gradient is rounding error in a random direction, by a rate, which
# changes the other gradients of narrow layers.
RATE = 1e-4
INTERVAL = 2  # steps between checkpoints
TOKENS, ROWS = 20_000, 61  # of the synthetic data; 61 rows divide evenly by no degree
SINGLE = ParallelismConfig(data=1)
DDP = ParallelismConfig(data=2)
ZERO3 = ParallelismConfig(data=2, zero=3)


@dataclass(frozen=True)
class ReducedRuns:
    """Runs that stand for a configuration. All have the same model, data, and number of micro-batches a step.

    `alone` runs on one process. `uncovered` has a line for each thing that they do not show.
    """

    axes: tuple[CutAxis, ...]
    worlds: tuple[World, ...]
    source: ParallelismConfig
    base: Config
    micro_batches: int
    model: Shrunk
    uncovered: tuple[str, ...]

    def of(self, parallelism: ParallelismConfig) -> Config:
        """Return the reduced configuration on a layout whose data degree is set."""
        data = self.base.data
        micro = data.global_batch_size // (self.micro_batches * (parallelism.data or 1))
        return replace(self.base, parallelism=parallelism, data=replace(data, micro_batch_size=micro))

    @property
    def alone(self) -> Config:
        """The reduced configuration on one process."""
        return self.of(SINGLE)

    def without(self, world: World, name: str) -> World | None:
        """Return a world with all its axes but one; None if there is no such legal world."""
        rest = tuple(axis for axis in self.axes if axis.name in world.names and axis.name != name)
        made = _plain(world_of(self.source, rest))
        return made if rest and legal(self.of(made.parallelism)) else None

    def describe(self, world: World) -> str:
        """Describe a world, e.g. `pipeline 2 x data 2 (zero 2) x tensor 2, 1f1b`."""
        return resolve(world.parallelism, world.ranks).describe(world.parallelism)


def reduce(config: Config, world: int) -> ReducedRuns:
    """Return the runs that stand for `config` on `world` ranks. Raises ConfigError if it cannot be reduced."""
    layout = check_world(config, world)
    spec = spec_of(config.model)
    sized = config
    with suppress(ConfigError):  # data that is only on the cluster
        sized = with_known_vocabulary(config, guess=True)
    shards, rows = layout.size("dp_shard"), spec.table_rows(sized.model)
    odd = bool(rows and (rows % config.parallelism.tensor or rows % shards))
    axes = axes_of(config.parallelism, layout)
    everything = world_of(config.parallelism, axes).parallelism
    uneven = any(each % shards for each in row_counts(spec, sized.model))
    extra = thirds(config.parallelism, axes, uneven)
    count = _micro_batches(config, layout.data_size, [everything, *(each.parallelism for each in extra)])
    base = _short(config, everything, count, odd)
    need = _need(sized, base, everything, rows, odd)
    need = replace(need, blocks=max([need.blocks, *(each.parallelism.pipeline for each in extra)]))
    small = shrunk(spec, config.model, need, lambda model: legal(replace(base, model=model, parallelism=everything)))
    base = replace(base, model=small.config)
    if any(each % 2 for each in row_counts(spec, spec.with_vocabulary(small.config, ROWS))):
        extra = [each for each in extra if each.names != ("data",)]  # two ranks have uneven shards too
    runs = ReducedRuns(axes, (), config.parallelism, base, count, small, ())

    def made(some: tuple[CutAxis, ...]) -> World:
        return _plain(world_of(config.parallelism, some))

    worlds, missing = cover(axes, made, lambda each: legal(runs.of(each.parallelism)))
    if not worlds:
        check(runs.of(made(axes).parallelism))
        raise ConfigError(
            f"{layout.describe(config.parallelism)}: no axis can be reduced to at most {MOST_RANKS} ranks"
        )
    extra = [each for each in map(_plain, extra) if legal(runs.of(each.parallelism))]
    lines = (*_missing(axes, worlds, missing), *_uncovered(config, extra))
    return replace(runs, worlds=(*worlds, *extra), uncovered=lines)


def _micro_batches(config: Config, data: int, layouts: list[ParallelismConfig]) -> int:
    """Return a small number of micro-batches a step that all these layouts can run: one where `config` has one."""
    batch, micro = config.data.global_batch_size, config.data.micro_batch_size
    micro = micro or largest_micro_batch(config.parallelism, [batch], data) or 1
    least = min(accumulation(batch, micro, data), 2 * layouts[0].pipeline)
    counts = itertools.count(max(1, least))
    return next(count for count in counts if not any(schedule_refuses(each, count) for each in layouts))


def _short(config: Config, everything: ParallelismConfig, count: int, odd: bool) -> Config:
    """Return the configuration with a few steps on little data, without what is only for speed or for a GPU."""
    data, trainer = config.data, config.trainer
    batch = count * math.lcm(6, everything.data or 1)  # for two and for three data ranks
    if data.unit == "tokens":
        unit = 2 * everything.context * everything.tensor * (3 if everything.pipeline % 3 == 0 else 1)
        length = -(-16 // unit) * unit
        data = SyntheticConfig(
            sequence_length=length,
            packing=data.packing,
            cache_dir=data.cache_dir,
            vocab_size=ROWS if odd or _pads(config) else 64,
            num_tokens=TOKENS,
        )
    data = replace(data, global_batch_size=batch, micro_batch_size=None, batch_ramp=None)
    if hasattr(data, "workers"):
        data = replace(data, workers=0)
    return replace(
        config,
        data=data,
        parallelism=everything,
        precision=_precision(config.precision),
        optimizer=_slow(config),
        trainer=replace(
            trainer,
            **{name: getattr(TrainerConfig(), name) for name in ("max_epochs", "stop_step", "max_time", "compile")},
            max_steps=STEPS,
            eval_interval=0,
            eval_samples=4,
            log_interval=1,
            noise_scale=False,
            host_memory_limit=None,
            max_restarts=0,
            profile_steps=[],
            replica_check_interval=0,
            sample_tokens=0,
            spike=SpikeConfig(),
        ),
        logger=LoggerConfig(),
        checkpoint=replace(config.checkpoint, interval=INTERVAL, keep=0, resume="auto", load="all"),
    )


def _slow(config: Config) -> Any:
    """Return the optimizer with a small learning rate. A 1-bit optimizer ends its warm-up before the first death."""
    optimizer = replace(config.optimizer, lr=min(config.optimizer.lr, RATE))
    return replace(optimizer, freeze_step=INTERVAL) if exchanges_momenta(config) else optimizer


def _precision(precision: PrecisionConfig) -> PrecisionConfig:
    """Return fp32 for `auto` and for fp8, which a CPU does not compute; other precisions are checked as they are."""
    return PrecisionConfig(Precision.fp32) if precision.dtype in (Precision.auto, Precision.fp8) else precision


def _pads(config: Config) -> bool:
    model = config.model
    return getattr(model, "vocab_multiple", 1) > 1


def _need(config: Config, base: Config, everything: ParallelismConfig, rows: int | None, odd: bool) -> Need:
    """Return the sizes that the reduced layout needs of a model, whose configuration is `config.model`."""
    layout, spec = config.parallelism, spec_of(config.model)
    stages = num_stages(everything) if everything.pipeline > 1 else 1
    count = spec.num_blocks(config.model)
    blocks = min(2, count or 2)
    if count:
        blocks = stages * (1 + everything.bucket_layers if count >= 2 * num_stages(layout) else 1)
        blocks += 1 if layout.pipeline > 1 and count % num_stages(layout) else 0
    vocabulary = spec.vocab_size(config.model)
    padded = not odd and rows is not None and rows != vocabulary
    return Need(
        everything.tensor,
        layout.tensor,
        everything.expert,
        layout.expert,
        min(blocks, count or blocks),
        base.data.sequence_length,
        config.data.sequence_length,
        ROWS if odd or padded else 64,
        1 if odd else 4,
    )


def _plain(world: World) -> World:
    """Return a world without what its degrees rule out."""
    parallelism = world.parallelism
    if parallelism.zeropp != ZeroppConfig() and (parallelism.data or 1) * parallelism.context == 1:
        parallelism = replace(parallelism, zeropp=ZeroppConfig())
    return replace(world, parallelism=parallelism)


def legal(config: Config) -> bool:
    """Return True if the configuration passes the checks of train."""
    with suppress(ConfigError):
        check(config)
        return True
    return False


def _missing(axes: tuple[CutAxis, ...], worlds: list[World], missing: list[tuple[str, ...]]) -> list[str]:
    """Return lines on axes that do not meet."""
    lines = [
        f"{' with '.join(pair)}: no legal world of at most {MOST_RANKS} ranks has {'both' if pair[1:] else 'it'}"
        for pair in missing
    ]
    if not any(len(world.names) == len(axes) for world in worlds):
        most = max((len(world.names) for world in worlds), default=0)
        lines.append(f"all {len(axes)} axes at once: each world has at most {most}, and each pair of axes meets in one")
    return lines


def _uncovered(config: Config, extra: list[World]) -> list[str]:
    """Return lines on what the runs do not show."""
    layout, alone = config.parallelism, {name for each in extra for name in each.names}
    lines = [
        "NCCL, GPU kernels and CUDA graphs: ranks are CPU processes over gloo",
        "degrees above 3, and ranks that hold no shard of a tensor",
        "rounding at the model's full width, depth and sequence length",
    ]
    if config.data.unit == "tokens" and not isinstance(config.data, SyntheticConfig):
        lines.append("the data: random tokens are read instead")
    if alone:
        lines.append(f"three ranks of {' and of '.join(sorted(alone))} together with the other axes")
    if config.precision.dtype in (Precision.auto, Precision.fp8):
        lines.append(f"precision={config.precision.dtype.name}: fp32 is compared")
    if config.trainer.compile:
        lines.append("trainer.compile=true: blocks are not compiled")
    if config.trainer.spike.policy != "none" or config.data.batch_ramp is not None or config.trainer.noise_scale:
        lines.append("rewinds after loss spikes, batch ramps and the noise scale are off")
    if compresses(config):
        lines.append("compressed communication in parity: it rounds gradients or momenta, so dense sums are compared")
    if layout.offload is Offload.nvme:
        lines.append("the local disks of the cluster")
    if layout.activation_checkpointing is ActivationCheckpointing.offload:
        lines.append("activations in host memory: a CPU has no other")
    return lines


def compresses(config: Config) -> bool:
    """Return True if ranks round what they send, so that a layout and one process agree only roughly."""
    layout = config.parallelism
    codecs = {layout.compression, layout.zeropp.weights, layout.zeropp.gradients}
    return codecs != {Compression.none} or exchanges_momenta(config)


def dense(config: Config) -> Config:
    """Return a configuration whose ranks send what they have, unrounded. A 1-bit optimizer stays in its warm-up."""
    layout, optimizer = config.parallelism, config.optimizer
    zeropp = replace(layout.zeropp, weights=Compression.none, gradients=Compression.none)
    if exchanges_momenta(config):
        optimizer = replace(optimizer, freeze_step=STEPS - 1)
    layout = replace(layout, compression=Compression.none, zeropp=zeropp)
    return replace(config, parallelism=layout, optimizer=optimizer)
