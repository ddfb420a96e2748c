"""Summary of a run: the banner at its start, and the results and next commands at its end."""

from __future__ import annotations

import platform
import re
import shlex
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gptlite.config import Config, hydra_value, to_dict
from gptlite.config.schema import schema_names
from gptlite.data.tokenizer import StreamDecoder
from gptlite.invocation import command
from gptlite.metrics.console import banner, format_bytes, format_count, format_duration
from gptlite.metrics.devices import device_peak_flops
from gptlite.metrics.memory import memory_bytes
from gptlite.metrics.meter import Throughput
from gptlite.metrics.plot import plot_curves
from gptlite.metrics.sinks import Sink, build_sinks, wandb_id
from gptlite.models.flops import Uncounted, count_flops
from gptlite.models.model import Model
from gptlite.models.sampling import Sampling
from gptlite.models.spec import spec_of
from gptlite.ops.backend import sdpa_words
from gptlite.ops.config import Attention
from gptlite.ops.select import Ops
from gptlite.optimizer.config import AdamWConfig
from gptlite.optimizer.schedule import Schedule, resolve_warmup_steps
from gptlite.optimizer.streamed import OffloadFailed
from gptlite.parallelism.boxes import num_local_elements
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.layout import num_stages, splits_backward, stages_per_rank
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_main
from gptlite.parallelism.replicas import ReplicasDiffer
from gptlite.parallelism.watchdog import RankStuck, Watch
from gptlite.precision import Policy, cpu_name
from gptlite.run.build import Run
from gptlite.run.folder import RunFolder, SaveFailed
from gptlite.trainer.loop import Ending, Outcome
from gptlite.trainer.memory import offload_words, predicted
from gptlite.trainer.report import Reporter
from gptlite.trainer.spike import Spiked
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Diverged

# What is left of a run, and what to try, by what ended it.
ADVICE: dict[type[Exception], str] = {
    Diverged: ". Stopped with the parameters of the step before; earlier checkpoints are intact. "
    "Try a lower optimizer.lr (now {lr:g}), more schedule.warmup_steps, optimizer.clip_norm=1",
    Spiked: ". Nothing was saved since, and earlier checkpoints are intact. "
    "Try a lower optimizer.lr (now {lr:g}), or skip more at once: trainer.spike.margin",
    ReplicasDiffer: ". Nothing was saved; of the earlier checkpoints, which are intact, resume from one before "
    "the last check that passed, on other hardware if it happens again",
    OffloadFailed: "; the same command goes on from the last checkpoint once it is mended",
    SaveFailed: "",
}


def announce(run: Run, folder: RunFolder) -> Reporter:
    """Print the banner and open the trackers on rank 0. Collective, as it gathers values of all ranks."""
    config, mesh, state, policy, ops = run.config, run.mesh, run.state, run.policy, run.ops
    batch, model, length = config.data, config.model, config.data.sequence_length
    spec, accumulation = state.model.spec, state.loader.num_micro_batches
    peak = device_peak_flops(mesh.device, policy.compute_dtype)
    per_token, uncounted = _flops(state.model, length, peak)
    per_step, steps = batch.global_batch_size * length, config.trainer.max_steps
    schedule = state.loader.schedule
    sizes, elements, layers = map(list, zip(*gather_objects(mesh, _share(state)), strict=True))
    total = schedule.trained(schedule.after(0, steps)) * length
    arithmetic = f"{format_count(total * per_token)} FLOP" if per_token else "FLOP n/a"
    count = sum({name: size for each in sizes for name, size in each.items()}.values())
    lines = [
        ("device", f"{device_words(mesh.device)}, torch {torch.__version__}"),
        *_layout(config.parallelism, folder.layout, mesh, accumulation, elements, layers),
        ("model", f"{spec.label(model)}: {format_count(count)} parameters, {spec.words(model)}".removesuffix(", ")),
        ("precision", f"{policy.name} ({policy.reason})"),
        ("ops", ", ".join(_ops(config, ops))),
        ("optimizer", _optimizer(config)),
        *_attention(config, mesh, policy, ops),
        *predicted(state, mesh, config.parallelism, policy, ops, length),
        *offload_words(state, config.parallelism),
        ("data", run.data.describe()),
        ("batch", f"{batch.global_batch_size} sequences of {length} = {per_step:,} tokens a step; "
                  f"{batch.global_batch_size} = micro-batch {state.loader.micro_batch_size} x "
                  f"{accumulation} accumulation x {mesh.data_size} data-parallel{_ramp(config)}"),
        ("length", f"{steps} steps = {format_count(total)} tokens, {total / count:.1f} a parameter, "
                   f"{total / max(1, run.data.num_train_tokens):.1f} epochs, {arithmetic}"),
        *uncounted,
        ("run folder", str(folder.path)),
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
    return Reporter(sinks, throughput, mesh.device, steps, folder.log)


def _flops(model: Model, length: int, peak: float | None) -> tuple[int | None, list[tuple[str, str]]]:
    """Return the FLOPs per token, and the banner's line on the reason if they are unknown.

    If the model gives none, they are counted, but only if there is a peak to compare them with.
    """
    found = model.flops_per_token(length)
    if found is not None or peak is None:
        return found, []
    try:
        return count_flops(model, length), []
    except Uncounted as error:
        return None, [("MFU", f"n/a: {error}")]


def _attention(config: Config, mesh: Mesh, policy: Policy, ops: Ops) -> list[tuple[str, str]]:
    """Return the banner's line on the kernel that SDPA uses, if attention is SDPA."""
    found = spec_of(config.model).attention(config.model)
    if found is None or ops.attention is not Attention.sdpa:
        return []
    heads, width, drops = found
    length = config.data.sequence_length
    words = sdpa_words(mesh.device, policy.compute_dtype, heads // mesh.size("tp"), length, width)
    return [("attention", f"SDPA takes {words}{'; dropout writes the scores out' if drops else ''}")]


def _ops(config: Config, ops: Ops) -> Iterator[str]:
    """Yield the path of each op, with AdamW's kernel only if the optimizer is AdamW."""
    for reason in ops.reasons:
        if not isinstance(config.optimizer, AdamWConfig):
            reason = re.sub(r"^adamw (?!, ).*|, adamw\b|^adamw, ", "", reason)
        if reason:
            yield reason


def _optimizer(config: Config) -> str:
    """`adamw: peak rate 0.003, weight decay 0.1, clipped at a gradient norm of 1; schedule wsd, ...`."""
    its = config.optimizer
    names = {group: name.removesuffix("_schema") for group, name in schema_names(config).items()}
    clipped = f"clipped at a gradient norm of {its.clip_norm:g}" if its.clip_norm else "not clipped"
    warmup = resolve_warmup_steps(config.schedule, config.trainer.max_steps)
    return (
        f"{names['optimizer']}: peak rate {its.lr:g}, weight decay {its.weight_decay:g}, {clipped}; "
        f"schedule {names['schedule']}, {_counted(warmup, 'step')} of warm-up"
    )


def _ramp(config: Config) -> str:
    """Return the suffix of the banner's line on the batch, if its size grows."""
    if config.data.batch_ramp is None:
        return ""
    start, increment, samples = config.data.batch_ramp
    return f"; it grows to that from {start} by {increment} over the first {samples:,} samples"


def _share(state: TrainState) -> tuple[dict[str, int], int, list[list[int]]]:
    """Return this rank's global parameter sizes by name, its number of local elements, and the layers of each part."""
    sizes = {name: parameter.numel() for name, parameter in state.named_parameters()}
    elements = sum(num_local_elements(p) for part in state.parts for p in part.parameters())
    return sizes, elements, [list(state.model.blocks(part)) for part in state.parts]


def _layout(
    config: ParallelismConfig, words: str, mesh: Mesh, micro_batches: int, elements: list[int], layers: list
) -> list[tuple[str, str]]:
    """Return the banner's line on several ranks: `8 ranks on CPU (gloo): pipeline 2 x ... ; layers 0-1 | 2-3; ...`."""
    if mesh.world_size == 1:
        return []
    text = f"{mesh.world_size} ranks on {mesh.device.type.upper()} ({dist.get_backend()}): {words}"
    if mesh.size("pp") > 1:
        held = [" + ".join(map(_span, each)) for each in layers[:: mesh.world_size // mesh.size("pp")]]
        text += (
            f" over {_counted(micro_batches, 'micro-batch')}{_bubble(config, micro_batches)}; layers {' | '.join(held)}"
        )
    least, most = format_count(min(elements)), format_count(max(elements))
    return [("layout", f"{text}; {least if least == most else f'{least} to {most}'} parameters a rank")]


def _bubble(config: ParallelismConfig, micro_batches: int) -> str:
    """` (idle 33% of the time by the schedule)`: the bubble of schedules with whole backward passes, (p - 1) / (vm + p
    - 1) with p ranks of v stages and m micro-batches (Narayanan et al. 2021, arXiv:2104.04473)."""
    if splits_backward(config):
        return ""
    passes, idle = stages_per_rank(config) * micro_batches, config.pipeline - 1
    return f" (ranks idle {idle / (passes + idle):.0%} of a step by the schedule)"


def _span(layers: list[int]) -> str:
    """Format as `0-3`, or `2` for one layer."""
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def device_words(device: torch.device) -> str:
    """Return e.g. `NVIDIA H200` or `AMD EPYC, 2 threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name() or platform.machine()}, {_counted(torch.get_num_threads(), 'thread')}"


def _counted(number: int, word: str) -> str:
    """Return e.g. `1 thread`, `2 threads`, `2 micro-batches`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('ch') else 's'}"


@dataclass
class Conclusion:
    """Outcome reported to `conclude`, and the exit code that it determines."""

    outcome: Outcome | None = None
    exit_code: int = 0


@contextmanager
def conclude(
    config: Config, run: RunFolder, state: TrainState, reporter: Reporter, started: float, watch: Watch
) -> Iterator[Conclusion]:
    """Close the trackers and write result.json however the block ends, and report the results of a completed run.

    Rank 0 writes. If the block fails, no rank waits for another, which may be gone.
    """
    conclusion = Conclusion()
    status = "failed"
    result = partial(_result, config, run, state, reporter, started)

    def note(error: RankStuck) -> None:  # this process is about to end, from another thread
        run.record(f"error: {error}")
        run.write_result(result(f"failed: {error}"))

    watch.ending = note
    try:
        yield conclusion
        assert conclusion.outcome is not None
        status, conclusion.exit_code = conclusion.outcome.ending.value, conclusion.outcome.exit_code
    except tuple(ADVICE) as error:
        word = {Diverged: "diverged", Spiked: "spiked"}.get(type(error), "failed")
        status, conclusion.exit_code = f"{word}: {error}", 1
        if isinstance(error, OffloadFailed) and run.mesh.world_size > 1:  # the others wait for this rank: it ends all
            raise
        run.error(f"error: {error}{ADVICE[type(error)].format(lr=config.optimizer.lr)}")
    except BaseException as error:
        status = f"failed: {watch.verdict() or f'{type(error).__name__}: {error}'}"
        run.record(traceback.format_exc())
        raise
    finally:
        try:
            reporter.close(failed=conclusion.outcome is None)
        finally:
            try:
                run.write_result(result(status, conclusion.outcome))
            except OSError as error:
                if conclusion.outcome is not None:
                    raise
                print(f"warning: no result.json: {error}")  # a full disk: what ended the run has been told
    if conclusion.outcome is not None:
        try:
            _close(config, run, state, reporter, started, conclusion.outcome)
        except Exception as error:  # the run is trained and saved: a picture that fails does not make it a failure
            run.log(f"warning: no closing report: {type(error).__name__}: {error}")


def _result(
    config: Config,
    run: RunFolder,
    state: TrainState,
    reporter: Reporter,
    started: float,
    status: str,
    outcome: Outcome | None = None,
) -> dict[str, Any]:
    """Return the content of result.json: how the run ended, and the figures that sweeps compare (see
    docs/sweeps.md)."""
    evaluation = outcome.evaluation if outcome else None
    return {
        "status": status,
        "step": state.step,
        "tokens": state.tokens,
        "best_val_loss": state.meta()["best_val_loss"],
        "val_loss": evaluation.loss if evaluation else None,
        "val_bits_per_byte": evaluation.bits_per_byte if evaluation else None,
        **reporter.figures(),
        "memory_peak_bytes": memory_bytes(reporter.device)["memory_peak_bytes"],
        "world_size": run.mesh.world_size,
        "layout": run.layout,
        "pipeline": _pipeline(config, state),
        "wall_seconds": time.monotonic() - started,
        "checkpoint": str(outcome.checkpoint) if outcome and outcome.checkpoint else None,
    }


def _pipeline(config: Config, state: TrainState) -> dict[str, Any] | None:
    """Return the data for a timeline of the pipeline; None without one.

    `stage_flops` has the FLOPs per token, forward and backward, of each stage's layers, and of the head in the last.
    """
    parallelism, model = config.parallelism, state.model
    if parallelism.pipeline == 1:
        return None
    layers = model.stage_blocks(num_stages(parallelism))
    block, end = model.spec.flops(model.config, config.data.sequence_length) or (1, 0)
    flops = [len(each) * block for each in layers]
    return {
        "ranks": parallelism.pipeline,
        "schedule": parallelism.schedule,
        "stages_per_rank": stages_per_rank(parallelism),
        "micro_batches": state.loader.num_micro_batches,
        "layers": [len(each) for each in layers],
        "stage_flops": [*flops[:-1], flops[-1] + end],
        "activation_checkpointing": parallelism.activation_checkpointing.value,
    }


def _close(
    config: Config, run: RunFolder, state: TrainState, reporter: Reporter, started: float, outcome: Outcome
) -> None:
    """Generate the sample, on all ranks, plot the curves and print the next commands."""
    if outcome.ending is Ending.done:
        _sample(config, run, state)
    if not run.mesh.is_main:
        return
    lines = [("ended", f"{outcome.ending.value}, step {state.step} of {config.trainer.max_steps}, "
                       f"{format_duration(time.monotonic() - started)}")]  # fmt: skip
    if (best := state.meta()["best_val_loss"]) is not None:
        lines.append(("best validation", f"{best:.4f} nats per token"))
    if outcome.evaluation is not None:
        bits = outcome.evaluation.bits_per_byte
        words = "" if bits is None else f", {bits:.4f} bits per byte"
        lines.append(("last validation", f"{outcome.evaluation.loss:.4f} nats per token{words}"))
    if reporter.spikes:
        steps = ", ".join(str(each["step"]) for each in reporter.spikes)
        skipped = sum(each["skipped_to"] - each["skipped_from"] for each in reporter.spikes)
        lines.append(("loss spikes", f"{len(reporter.spikes)}, at step {steps}; {_counted(skipped, 'sample')} skipped"))
    if (peak := memory_bytes(reporter.device)["memory_peak_bytes"]) is not None:
        average = reporter.usage.memory
        lines.append(("peak memory", format_bytes(peak) + (f", {format_bytes(average)} on average" if average else "")))
    used, what = reporter.usage.utilization, "GPU" if reporter.device.type == "cuda" else "processor time"
    lines.append(("utilisation", "n/a: install nvidia-ml-py" if used is None else f"{used:.0%} of the {what}"))
    lines += reporter.memory.lines()
    if config.parallelism.offload is not Offload.none:
        lines += reporter.memory.offloaded()
    if reporter.speeds:
        lines.append(("curves", str(plot_curves(run.path / "metrics.jsonl", run.path / "curves.png"))))
    more = f" trainer.max_steps={2 * config.trainer.max_steps}" if outcome.ending is Ending.done else ""
    if outcome.ending is Ending.stop_step:
        more = " trainer.stop_step=null"
    run.log(banner(lines, title="results"))
    # Not in the banner: a command that wraps cannot be copied.
    resume = f"{command('train')} {shlex.quote(f'run.dir={hydra_value(str(run.path))}')}{more}"
    run.log(f"resume:    {resume}{_rise(config, state.step) if outcome.ending is Ending.done else ''}")
    if state.model.spec.writes_text:
        prompt = config.trainer.sample_prompt.strip()
        words = f" {shlex.quote(f'prompt={prompt}')}" if prompt else ""
        run.log(f"generate:  {command('generate')} {shlex.quote(f'checkpoint={run.path}')}{words}")


def _rise(config: Config, step: int) -> str:
    """A shell comment on a learning rate that rises again where the schedule is stretched over twice the steps."""
    steps, lr = config.trainer.max_steps, config.optimizer.lr
    now, then = (lr * Schedule(config.schedule, each).factor(at) for each, at in ((steps, step - 1), (2 * steps, step)))
    return f"  # its schedule is stretched: the rate rises from {now:.1e} to {then:.1e}" if then > 1.1 * now else ""


def _sample(config: Config, run: RunFolder, state: TrainState) -> None:
    tokenizer, trainer = run.tokenizer, config.trainer
    if not state.model.spec.writes_text or tokenizer is None or not trainer.sample_prompt or not trainer.sample_tokens:
        return
    prompt = tokenizer.encode(trainer.sample_prompt)
    decoder = StreamDecoder(tokenizer)
    sampling = Sampling(seed=config.seed)
    # Compiled blocks would be compiled again for every length of the cache.
    with torch.compiler.set_stance("force_eager"):
        spec, count = state.model.spec, trainer.sample_tokens
        tokens = spec.generate(state.runner, prompt, count, sampling, stop=tokenizer.eod, cache=True)
        text = "".join([decoder.push(token) for token in tokens]) + decoder.flush()
    if not run.mesh.is_main:
        return
    run.log(banner([], title="sample").splitlines()[0])
    run.log(trainer.sample_prompt.strip("\n") + text)
