"""Checks of a configuration across its sections, before anything is written or any rank starts."""

from __future__ import annotations

import math
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from gptlite.config.batch import check_batch
from gptlite.config.bounds import check_bounds
from gptlite.config.completed import check_length
from gptlite.config.plugins import CHECKS
from gptlite.config.schema import Config, RunConfig, schema_names
from gptlite.data.check import check_settings as check_data
from gptlite.errors import ConfigError, did_you_mean
from gptlite.metrics.sinks import check_logger
from gptlite.models.base import is_built
from gptlite.models.registry import spec_of
from gptlite.ops import apex
from gptlite.ops.config import LayerNormKernel
from gptlite.optimizer.registry import elementwise_optimizers, optimizer_name
from gptlite.parallelism.config import ActivationCheckpointing, Offload, ParallelismConfig
from gptlite.parallelism.layout import (
    Layout,
    divisors,
    listed,
    num_stages,
    resolve,
    rule,
    stages_per_rank,
)
from gptlite.precision import Precision, check_precision

FP8_HEAD = "precision.fp8_head=true"
FP8_MULTIPLE = 16  # the hardware requires each dimension of an fp8 GEMM to be a multiple of this


def check(config: Config) -> None:
    """Raise a one-line ConfigError for the first invalid key."""
    _run(config.run)
    check_bounds(config)
    check_data(config.data)
    _model(config)
    check_precision(config.precision)
    check_layout(config)
    _trainer(config)
    _spike(config)
    check_length(config)
    _ops(config)
    _one_of("checkpoint.load", config.checkpoint.load, ("all", "weights"))
    check_logger(config.logger)
    for refuse in CHECKS:
        refuse(config)


def check_layout(config: Config) -> None:
    """Check the settings that depend on the layout and on the micro-batch size. Raises ConfigError."""
    layout = config.parallelism
    _parallelism(config)
    check_batch(config)
    _fp8(config)
    _master_weights(config)
    config.optimizer.check_placement(layout.zero, layout.tensor, layout.offload.value)


def check_forward(config: Config, world: int) -> Layout:
    """Return the layout of a run on `world` ranks that only does forward passes. The batch is not checked. Raises a
    one-line ConfigError if the degrees do not divide `world` or do not fit the model."""
    _parallelism(config)
    return resolve(config.parallelism, world)


def check_device(config: Config, device: str) -> None:
    """Raise a one-line ConfigError for settings that this type of device, cpu or cuda, does not support."""
    config.optimizer.check_device(device)


def _run(run: RunConfig) -> None:
    """Raise ConfigError for a name that leaves the folder of runs, or for the root as a run's folder."""
    for key in ("name", "dir"):
        if not getattr(run, key).strip():
            raise ConfigError(f"run.{key} is empty; set it, or leave it out")
    name, folder = Path(run.name), Path(run.dir).expanduser().resolve()
    if not name.name or name.is_absolute() or ".." in name.parts:
        raise ConfigError(f"run.name={run.name} does not name a folder in outputs/; give a name such as try-1")
    if folder == Path(folder.anchor):
        raise ConfigError(f"run.dir={run.dir} is the root of the file system; give a folder below it")


def _model(config: Config) -> None:
    spec = spec_of(config.model)
    spec.check(config.model)  # the model's own rules, before those that relate it to other sections
    if (unit := config.data.unit) != spec.reads:
        data = getattr(config.data, "corpus", schema_names(config)["data"].removesuffix("_schema"))
        raise ConfigError(
            f"the {spec.name} model reads {spec.reads}, but data={data} has {unit}; choose another model= or data="
        )
    longest = spec.max_length(config.model)
    if longest is not None and config.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length={config.data.sequence_length} is longer than model.sequence_length="
            f"{longest}, the model's maximum sequence length; lower the first or raise the second"
        )


def _parallelism(config: Config) -> None:
    layout = config.parallelism
    _context(config)
    _tensor(config)
    _expert(config)
    _pipeline(config)
    _offload(config)
    if layout.activation_checkpointing is ActivationCheckpointing.offload:
        others = "use parallelism.activation_checkpointing=full or none"
        if config.trainer.compile:
            raise ConfigError(f"parallelism.activation_checkpointing=offload cannot run in compiled blocks; {others}, "
                              "or trainer.compile=false")  # fmt: skip
        if layout.context > 1:
            raise ConfigError(f"parallelism.activation_checkpointing=offload with parallelism.context={layout.context} "
                              f"would also offload gathered keys and values; {others}")  # fmt: skip


def _offload(config: Config) -> None:
    """Check the offload settings. The folder and its free space are checked later, on each machine that runs ranks
    (gptlite/launch/room.py)."""
    offload, path = config.parallelism.offload, config.parallelism.offload_path
    if config.parallelism.offload_parameters:
        _offload_parameters(config.parallelism)
    if offload is not Offload.nvme:
        if path is not None:
            raise ConfigError(
                f"parallelism.offload_path={path} is only for parallelism.offload=nvme, not {offload.value}; "
                f"leave it out, or use parallelism.offload=nvme"
            )
        return
    if not path:
        raise ConfigError(
            "parallelism.offload=nvme needs a folder for its files; set it, e.g. parallelism.offload_path=/nvme/run1"
        )
    if not config.optimizer.elementwise:
        raise ConfigError(
            f"parallelism.offload=nvme updates pieces of parameters separately, which optimizer="
            f"{optimizer_name(type(config.optimizer))} does not allow; use parallelism.offload=cpu, or "
            f"{elementwise_optimizers()}"
        )


def _context(config: Config) -> None:
    length, ranks = config.data.sequence_length, config.parallelism.context
    if ranks == 1:
        return
    spec = spec_of(config.model)
    if not spec.takes_context(config.model):
        raise ConfigError(_no_axis(config, "context", "does not support attention over a sharded sequence"))
    if length % (2 * ranks) == 0:
        return
    longest = spec.max_length(config.model) or math.inf
    tries = [f"parallelism.context={listed(divisors(length // 2) if length % 2 == 0 else [1])}"]
    below = length // (2 * ranks) * 2 * ranks
    lengths = [size for size in (below, below + 2 * ranks) if 0 < size <= longest]
    tries += [f"data.sequence_length={listed(lengths, 'or')}"] if lengths else []
    raise ConfigError(
        f"data.sequence_length={length} is not divisible by 2 x parallelism.context={ranks} = {2 * ranks}, the number "
        f"of chunks that balances causal attention; try {', or '.join(tries)}"
    )


def _offload_parameters(config: ParallelismConfig) -> None:
    """Check the settings with which parameters and gradients can be in files."""
    key = "parallelism.offload_parameters=true"
    if config.offload is not Offload.nvme:
        raise ConfigError(f"{key} is only for parallelism.offload=nvme, not {config.offload.value}; leave it out, or "
                          "use parallelism.zero=3 parallelism.offload=nvme "
                          "parallelism.offload_path=/nvme/run1")  # fmt: skip
    if config.zero != 3 and not config.auto:  # the planner checks each of its layouts
        raise ConfigError(f"{key} gathers parameters block by block, which parallelism.zero={config.zero} does not; "
                          "use parallelism.zero=3")  # fmt: skip
    if config.dp_replicate > 1:
        raise ConfigError(f"{key} with parallelism.dp_replicate={config.dp_replicate} would sum gradients in memory; "
                          "use parallelism.dp_replicate=1, which shards over all data ranks")  # fmt: skip


def _tensor(config: Config) -> None:
    spec, tensor, sequence = spec_of(config.model), config.parallelism.tensor, config.parallelism.sequence
    sizes = spec.tensor_sizes(config.model)
    if sizes is None:
        if tensor > 1:
            raise ConfigError(_no_axis(config, "tensor", "has no sharding plan"))
        sizes = {}
    length = config.data.sequence_length // config.parallelism.context
    degrees = divisors(math.gcd(*sizes.values(), length if sequence else 0))  # gcd(n, 0) is n: no constraint
    if sequence and tensor == 1:
        others = f", or parallelism.tensor={listed(degrees[1:], 'or')}" if degrees[1:] else ""
        raise ConfigError(
            f"parallelism.sequence=true splits sequences over tensor-parallel ranks, but parallelism.tensor=1; "
            f"use parallelism.sequence=false{others}"
        )
    cut = dict(sizes)
    if sequence:
        ranks, whole = config.parallelism.context, config.data.sequence_length
        shared = "" if ranks == 1 else f"={whole} / parallelism.context={ranks}"
        cut[f"data.sequence_length{shared}"] = length
    for key, size in cut.items():
        if size % tensor:
            value = f" = {size}" if "=" in key else f"={size}"
            raise ConfigError(f"{key}{value} is not divisible by parallelism.tensor={tensor}; "
                              f"try parallelism.tensor={listed(degrees)}")  # fmt: skip
    if (rows := spec.table_rows(config.model)) is not None and tensor > rows:
        raise ConfigError(f"parallelism.tensor={tensor} exceeds the {rows} rows of the embedding; use at most {rows}")


def _expert(config: Config) -> None:
    experts, degree = spec_of(config.model).experts(config.model), config.parallelism.expert
    if degree == 1:
        return
    if experts is None:
        raise ConfigError(
            f"parallelism.expert={degree}: the model has no experts; use parallelism.expert=1, or e.g. model=moe-lite"
        )
    if experts % degree:
        raise ConfigError(
            f"model.moe.experts={experts} is not divisible by parallelism.expert={degree}; "
            f"try parallelism.expert={listed(divisors(experts))}"
        )


def _no_axis(config: Config, axis: str, why: str) -> str:
    degree = getattr(config.parallelism, axis)
    name = spec_of(config.model).name
    return f"parallelism.{axis}={degree}: the {name} model {why}; use parallelism.{axis}=1, or parallelism=zero3"


def _fp8(config: Config) -> None:
    spec, tensor = spec_of(config.model), config.parallelism.tensor
    if config.precision.dtype is Precision.fp8:
        _fp8_sizes("precision=fp8", "precision=bf16", spec.name, spec.product_sizes(config.model), tensor)
    if config.precision.fp8_head:  # the tensor axis divides its rows, which are padded
        _fp8_sizes(FP8_HEAD, "precision.fp8_head=false", spec.name, spec.head_sizes(config.model), 1)


def _fp8_sizes(key: str, other: str, model: str, sizes: dict[str, int] | None, tensor: int) -> None:
    if sizes is None:
        raise ConfigError(f"{key}: the {model} model has no GEMMs that run in fp8; use {other}")
    for name, size in sizes.items():
        if size % (FP8_MULTIPLE * tensor):
            by = f" x parallelism.tensor={tensor}" if tensor > 1 else ""
            raise ConfigError(
                f"{name}={size} is not divisible by {FP8_MULTIPLE}{by}, as {key} requires of GEMM dimensions; "
                f"use {other}, or {name}={-(-size // (FP8_MULTIPLE * tensor)) * FP8_MULTIPLE * tensor}"
            )


def _master_weights(config: Config) -> None:
    if config.precision.master_weights:
        return
    key, layout = "precision.master_weights=false", config.parallelism
    if not config.optimizer.elementwise:
        raise ConfigError(
            f"{key} updates parameters one at a time in fp32, which optimizer={optimizer_name(type(config.optimizer))} "
            f"does not allow; use precision=bf16, or {elementwise_optimizers()}"
        )
    if layout.offload is Offload.nvme:
        raise ConfigError(f"{key} does not support parallelism.offload=nvme, which updates pieces from files; use "
                          f"precision=bf16, or parallelism.offload=cpu")  # fmt: skip
    if layout.pipeline > 1 and rule(layout).splits_backward:
        raise ConfigError(
            f"{key} would accumulate gradients in bf16, since parallelism.schedule={layout.schedule} splits the "
            f"backward pass; use precision=bf16, or parallelism.schedule=interleaved_1f1b or 1f1b"
        )


def _pipeline(config: Config) -> None:
    layout, spec = config.parallelism, spec_of(config.model)
    if layout.pipeline == 1 and is_built(spec.num_blocks):
        return  # the default num_blocks builds the model, which imports torch
    layers, key = spec.num_blocks(config.model), f"model.{spec.blocks_key}"
    if getattr(config.model, spec.blocks_key, None) != layers:
        key = f"the {spec.name} model's number of blocks"
    if layers is None:
        if layout.pipeline > 1:
            raise ConfigError(_no_axis(config, "pipeline", "does not declare its number of blocks"))
        return
    if layout.pipeline > 1 and is_built(spec.tied) and (tied := spec.tied(config.model)):
        copy, owner = next(iter(tied.items()))
        raise ConfigError(_no_axis(config, "pipeline", f"ties {copy} to {owner}, which stages cannot share"))
    schedule, ranks, virtual = rule(layout), layout.pipeline, layout.virtual_stages
    if schedule.fixed and virtual not in (None, schedule.virtual):
        raise ConfigError(
            f"parallelism.virtual_stages={virtual}: parallelism.schedule={layout.schedule} has {schedule.virtual} per "
            f"rank; use parallelism.virtual_stages={schedule.virtual}, or parallelism.schedule=interleaved_1f1b or "
            "zero_bubble"
        )
    per_rank, stages = stages_per_rank(layout), num_stages(layout)
    if stages > layers:
        tries = [f"parallelism.pipeline={listed(list(range(1, layers // per_rank + 1)))}"] if layers >= per_rank else []
        if per_rank > 1 and ranks <= layers:
            fewer = "parallelism.schedule=1f1b" if schedule.fixed else f"parallelism.virtual_stages={layers // ranks}"
            tries.append(fewer)
        if key.startswith("model."):
            tries.append(f"{key}={stages}")
        raise ConfigError(
            f"parallelism.pipeline={ranks} x {per_rank} stages per rank = {stages} stages, and every stage needs at "
            f"least one block, but {key}={layers}{'; try ' if tries else ''}{', or '.join(tries)}"
        )
    if ranks > 1 and schedule.splits_backward and not torch_splits():
        raise ConfigError(
            f"parallelism.schedule={layout.schedule} needs torch 2.12 or newer: torch {version('torch')} computes "
            f"wrong gradients if the backward pass is split; use parallelism.schedule=interleaved_1f1b or 1f1b"
        )
    if config.trainer.compile and ranks > 1 and schedule.splits_backward:
        raise ConfigError(
            f"trainer.compile=true: the backward pass of a compiled block cannot be split, as parallelism.schedule="
            f"{layout.schedule} does; use trainer.compile=false, or parallelism.schedule=interleaved_1f1b or 1f1b"
        )


@cache
def torch_splits() -> bool:
    """Return True if the installed torch can split backward passes. Before 2.12, torch.distributed.pipelining adds up
    the gradients of an op's outputs if the op has several."""
    major, minor, *_ = version("torch").split(".")
    return (int(major), int(minor)) >= (2, 12)


def _trainer(config: Config) -> None:
    trainer = config.trainer
    _one_of("trainer.cuda_graph", trainer.cuda_graph.lower(), ("auto", "false"))
    if trainer.host_memory_limit is not None and sys.platform != "linux":
        raise ConfigError(
            f"trainer.host_memory_limit={trainer.host_memory_limit:g}: this limit needs Linux; leave it out"
        )


def _spike(config: Config) -> None:
    spike = config.trainer.spike
    _one_of("trainer.spike.policy", spike.policy, ("none", "skip"))
    if spike.policy == "none":
        return
    if not config.checkpoint.interval:
        raise ConfigError("trainer.spike.policy=skip rewinds to checkpoints, but checkpoint.interval=0 saves none "
                          "before the end; set it, e.g. checkpoint.interval=250")  # fmt: skip
    if config.checkpoint.keep == 1:
        raise ConfigError("trainer.spike.policy=skip with checkpoint.keep=1: the only checkpoint kept may have "
                          "been saved during a spike; use checkpoint.keep=2 or more, or 0 for all")  # fmt: skip


def _ops(config: Config) -> None:
    if config.ops.layer_norm is not LayerNormKernel.apex:
        return
    if reason := apex.why_not(apex.LAYER_NORM):
        raise ConfigError(f"ops.layer_norm=apex: {reason}, or use ops.layer_norm=auto")
    if not spec_of(config.model).norms_have_biases(config.model):
        raise ConfigError(
            "ops.layer_norm=apex always has biases, but the norms of this model have none: see model.norm and "
            "model.bias; use ops.layer_norm=auto"
        )


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is not {' or '.join(choices)}{did_you_mean(value, choices)}")
