"""Banner at the start of a run: device, layout, model, precision, optimizer, memory, data and length."""

from __future__ import annotations

import platform

import torch
import torch.distributed as dist

from gptlite.config.saved import to_dict
from gptlite.config.schema import Config, schema_names
from gptlite.cpu import cpu_name
from gptlite.data.opened import OpenedData
from gptlite.metrics.console import banner, format_bytes, format_count, format_parameters
from gptlite.metrics.devices import device_peak_flops
from gptlite.metrics.meter import Throughput
from gptlite.metrics.sinks import Sink, build_sinks, wandb_id
from gptlite.models.capabilities import PlainModule, Uncounted, capability
from gptlite.models.model import Model
from gptlite.models.registry import spec_of
from gptlite.ops.backend import sdpa_words
from gptlite.ops.config import Attention
from gptlite.ops.select import Ops
from gptlite.optimizer.schedule import resolve_warmup_steps
from gptlite.parallelism.boxes import local_tensor, num_local_elements
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.in_files import InFiles
from gptlite.parallelism.layout import splits_backward, stages_per_rank
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_main
from gptlite.precision import Policy
from gptlite.progress import counted
from gptlite.trainer.attached import Attached
from gptlite.trainer.build import Run
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.report import Reporter
from gptlite.trainer.state import TrainState


def announce(run: Run, folder: RunFolder, attached: Attached) -> Reporter:
    """Print the banner, and open the trackers on rank 0. Return the reporter, with the observers of the run.

    Collective, as it gathers values.
    """
    config, mesh, state, policy, ops = run.config, run.mesh, run.state, run.policy, run.ops
    batch, model, length = config.data, config.model, config.data.sequence_length
    spec, accumulation = state.model.spec, state.loader.num_micro_batches
    peak = device_peak_flops(mesh.device, policy.compute_dtype)
    per_token, uncounted = _flops(state.model, length, peak, run.data)
    per_step, steps = batch.global_batch_size * length, config.trainer.max_steps
    epoch = run.data.num_samples(length)
    schedule = state.loader.schedule
    sizes, elements, layers = map(list, zip(*gather_objects(mesh, _share(state)), strict=True))
    total = schedule.trained(schedule.after(0, steps)) * length
    least = "at least " if schedule.measured else ""
    arithmetic = f"{format_count(total * per_token)} FLOP" if per_token else "FLOP n/a"
    count = sum({name: size for each in sizes for name, size in each.items()}.values())
    size = format_parameters(count, spec.idle_parameters(model))
    idle = [op for op, _ in ops.chosen if not (config.optimizer.adam_kernel if op == "adamw" else spec.uses(model, op))]
    used = ", ".join(ops.reasons_without(*idle))
    fillers = -batch.global_batch_size % (state.loader.micro_batch_size * mesh.data_size)
    less = f" - {counted(fillers, 'filler')}" if fillers else ""
    lines = [
        ("device", f"{device_words(mesh.device)}, torch {torch.__version__}"),
        *_layout(config.parallelism, folder.layout, mesh, accumulation, elements, layers),
        ("model", f"{spec.label(model)}: {size}, {spec.words(model)}".removesuffix(", ")),
        ("precision", f"{policy.name} ({policy.reason})"),
        *([("ops", used)] if used else []),
        ("optimizer", _optimizer(config)),
        *_attention(config, mesh, policy, ops),
        *([("memory", attached.memory)] if attached.memory else []),
        *offload_words(state, config.parallelism),
        ("data", run.data.describe()),
        *_tokenizer_warning(run.data),
        ("batch", f"{_step_words(config)}; "
                  f"{batch.global_batch_size} = micro-batch {state.loader.micro_batch_size} x "
                  f"{accumulation} accumulation x {mesh.data_size} data-parallel{less}{_ramp(config)}"),
        ("length", f"{steps} steps = {least}{format_count(total)} {batch.unit}, {total / count:.3g} per parameter, "
                   f"{total / length / epoch:.3g} epochs, {arithmetic}"),
        *uncounted,
        ("run folder", f"{folder.path}{' (a new run)' if folder.resume_from is None and not state.step else ''}"),
    ]  # fmt: skip
    if mesh.is_main:
        folder.log(banner(lines))
    sinks: list[Sink] = []

    def open_trackers() -> None:
        sinks.extend(
            build_sinks(
                config.logger, folder.path, config.run.name, to_dict(config), state.wandb_id, state.step, folder.log
            )
        )

    from_main(mesh, open_trackers)
    state.wandb_id = wandb_id(sinks) or state.wandb_id
    folder.write_config()
    folder.write_order(state)
    throughput = Throughput(
        tokens_per_step=per_step,
        samples_per_step=batch.global_batch_size,
        flops_per_token=per_token,
        peak_flops=peak,
        num_devices=mesh.world_size,
    )
    return Reporter(
        sinks,
        throughput,
        config.trainer.last_step,
        folder.log,
        batch.unit,
        epoch if batch.unit == "samples" else None,
        attached.observers(run, folder, throughput),
    )


def _flops(model: Model, length: int, peak: float | None, data: OpenedData) -> tuple[int | None, list[tuple[str, str]]]:
    """Return the FLOPs per token (or per sample), or None, and a banner line with the reason if counting failed.

    If the model has no formula, its FLOPs are counted, but only if the device's peak FLOP/s is known.
    """
    found = model.flops_per_token(length)
    plain = capability(model.spec, PlainModule)
    if found is not None or peak is None or plain is None:
        return found, []
    try:
        return plain.count_flops(model.config, length, data.example()), []
    except Uncounted as error:
        return None, [("MFU", f"n/a: {error}")]


def _tokenizer_warning(data: OpenedData) -> list[tuple[str, str]]:
    """Return the banner's line on data that its tokenizer may have changed; no line without such a reason."""
    tokenizer = data.tokenizer
    return [("warning", f"{tokenizer.warning}; prepare the data again")] if tokenizer and tokenizer.warning else []


def _attention(config: Config, mesh: Mesh, policy: Policy, ops: Ops) -> list[tuple[str, str]]:
    """Return the banner's line on the kernel that SDPA uses; no line if the run does not use SDPA."""
    found = spec_of(config.model).attention(config.model)
    if found is None or ops.attention is not Attention.sdpa:
        return []
    heads, width, drops = found
    length = config.data.sequence_length
    words = sdpa_words(mesh.device, policy.compute_dtype, heads // mesh.size("tp"), length, width)
    return [("attention", f"SDPA uses {words}{'; dropout writes the scores to memory' if drops else ''}")]


def offload_words(state: TrainState, config: ParallelismConfig) -> list[tuple[str, str]]:
    """Return the banner's line on rank 0's offloaded state as [(label, text)]; an empty list without offload."""
    if config.offload is Offload.none:
        return []
    shards = [local_tensor(p) for part in state.parts for p in part.parameters()]
    weights, gradients = sum(p.nbytes for p in shards), sum(torch.float32.itemsize * p.numel() for p in shards)
    dtype = "bf16" if weights < gradients else "fp32"
    sizes = f"{format_bytes(weights)} of {dtype} weights", f"{format_bytes(gradients)} of gradients"
    if isinstance(state.optimizer, InFiles):
        text = state.optimizer.describe(*sizes, config.offload_path)
    else:
        text = f"{' and '.join(sizes)}, and the optimizer state, in host memory"
    return [("offload", f"{config.offload.value}: on rank 0 {text}")]


def _optimizer(config: Config) -> str:
    """Return e.g. `adamw: peak rate 0.003, weight decay 0.1, clipped at a gradient norm of 1; schedule ...`."""
    optimizer = config.optimizer
    names = {group: name.removesuffix("_schema") for group, name in schema_names(config).items()}
    clipped = f"clipped at a gradient norm of {optimizer.clip_norm:g}" if optimizer.clip_norm else "not clipped"
    warmup = resolve_warmup_steps(config.schedule, config.trainer.max_steps)
    return (
        f"{names['optimizer']}: peak rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, {clipped}; "
        f"schedule {names['schedule']}, {counted(warmup, 'step')} of warm-up"
    )


def _step_words(config: Config) -> str:
    """Return e.g. `16 sequences of 256 = 4,096 tokens per step`, or `32 samples per step`."""
    size, length, unit = config.data.global_batch_size, config.data.sequence_length, config.data.unit
    if unit == "samples":
        return f"{size} samples per step"
    return f"{size} sequences of {length} = {size * length:,} tokens per step"


def _ramp(config: Config) -> str:
    """Return the batch-size ramp for the end of the banner's line on the batch; empty if there is none."""
    if config.data.batch_ramp is None:
        return ""
    start, increment, *samples = config.data.batch_ramp
    until = f"over the first {samples[0]:,} samples" if samples else "while below the noise scale"
    return f"; batch size ramp from {start} in steps of {increment} {until}"


def _share(state: TrainState) -> tuple[dict[str, int], int, list[list[int]]]:
    """Return {name: global size} of this rank's parameters, its number of local elements, and each stage's layers."""
    sizes = {name: parameter.numel() for name, parameter in state.named_parameters()}
    elements = sum(num_local_elements(p) for part in state.parts for p in part.parameters())
    return sizes, elements, [list(state.model.blocks(part)) for part in state.parts]


def _layout(
    config: ParallelismConfig, layout: str, mesh: Mesh, micro_batches: int, elements: list[int], layers: list
) -> list[tuple[str, str]]:
    """Return the banner's line on the layout, e.g. `8 ranks on CPU (gloo): pipeline 2 x ...`; no line for one rank."""
    if mesh.world_size == 1:
        return []
    text = f"{mesh.world_size} ranks on {mesh.device.type.upper()} ({dist.get_backend()}): {layout}"
    if mesh.size("pp") > 1:
        held = [" + ".join(map(_span, each)) for each in layers[:: mesh.world_size // mesh.size("pp")]]
        text += (
            f" over {counted(micro_batches, 'micro-batch')}{_bubble(config, micro_batches)}; layers {' | '.join(held)}"
        )
    least, most = format_count(min(elements)), format_count(max(elements))
    return [("layout", f"{text}; {least if least == most else f'{least} to {most}'} parameters per rank")]


def _bubble(config: ParallelismConfig, micro_batches: int) -> str:
    """Return e.g. ` (pipeline bubble: 33% of a step)`; empty for schedules that split the backward pass.

    The bubble is (p - 1) / (v m + p - 1), with p ranks, v stages per rank and m micro-batches (Narayanan et al. 2021,
    arXiv:2104.04473).
    """
    if splits_backward(config):
        return ""
    passes, idle = stages_per_rank(config) * micro_batches, config.pipeline - 1
    return f" (pipeline bubble: {idle / (passes + idle):.0%} of a step)"


def _span(layers: list[int]) -> str:
    """Return a range of layers, e.g. `0-3`, or `2` for one layer."""
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def device_words(device: torch.device) -> str:
    """Return e.g. `NVIDIA H200` or `AMD EPYC, 2 threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name() or platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"
