"""End of a run: result.json, the summary, the sample and the commands to continue."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gptlite.config.overrides import command_value, hydra_value
from gptlite.config.plugins import as_override
from gptlite.config.schema import Config
from gptlite.errors import RunEnded, one_line, printable, text_of
from gptlite.invocation import command, launched_command
from gptlite.metrics.console import banner, format_duration
from gptlite.models.capabilities import Sampling, TextGeneration, capability
from gptlite.optimizer.schedule import Schedule
from gptlite.parallelism.layout import num_stages, stages_per_rank
from gptlite.progress import counted
from gptlite.tokenizers.base import StreamDecoder
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.observers import Watch
from gptlite.trainer.report import Reporter
from gptlite.trainer.state import TrainState
from gptlite.trainer.trainer import Ending, Outcome


@dataclass
class Conclusion:
    """Outcome of the run, set in the block of `conclude`, and the resulting exit code and content of result.json."""

    outcome: Outcome | None = None
    exit_code: int = 0
    result: dict[str, Any] = field(default_factory=dict)


@contextmanager
def conclude(
    config: Config, run: RunFolder, state: TrainState, reporter: Reporter, started: float, watch: Watch
) -> Iterator[Conclusion]:
    """Context manager that closes the observers and trackers and writes result.json when the block ends or raises.

    If the run completed, it also reports the results. Rank 0 writes. If the block raises, no rank waits for other
    ranks, since they may have exited.
    """
    conclusion = Conclusion()
    status = "failed"
    result = partial(_result, config, run, state, reporter, started)

    def note(error: Exception) -> None:  # called in the watchdog's thread, which then ends this process
        run.record(f"error: {error}")
        run.write_result(result(f"failed: {error}"))

    watch.ending = note
    try:
        yield conclusion
        assert conclusion.outcome is not None
        status, conclusion.exit_code = conclusion.outcome.ending.value, conclusion.outcome.exit_code
    except RunEnded as error:
        status, conclusion.exit_code = f"{error.word}: {error}", 1
        # The other ranks wait for this one, and end only if it fails.
        if not error.everywhere and run.mesh.world_size > 1:
            raise
        run.error(f"error: {error}{error.advice.format(lr=config.optimizer.lr)}")
    except BaseException as error:
        status = f"failed: {watch.verdict() or f'{type(error).__name__}: {printable(text_of(error))}'}"
        run.record(traceback.format_exc())
        raise
    finally:
        try:
            reporter.close(failed=conclusion.outcome is None)
        finally:
            try:
                conclusion.result = result(status, conclusion.outcome)
                run.write_result(conclusion.result)
            except OSError as error:
                if conclusion.outcome is not None:
                    raise
                # E.g. a full disk. The error that ended the run has been reported already.
                print(f"warning: result.json was not written: {error}")
    if conclusion.outcome is not None:
        try:
            _close(config, run, state, reporter, started, conclusion.outcome)
        except Exception as error:  # training is complete and saved, so a failed report is only a warning
            run.log(f"warning: the closing report failed: {type(error).__name__}: {text_of(error)}")


def _result(
    config: Config,
    run: RunFolder,
    state: TrainState,
    reporter: Reporter,
    started: float,
    status: str,
    outcome: Outcome | None = None,
) -> dict[str, Any]:
    """Return the content of result.json: the run's status, and the metrics that sweeps compare (docs/sweeps.md)."""
    evaluation = outcome.evaluation if outcome else None
    return {
        "status": status,
        "step": state.step,
        "tokens": state.tokens,
        "unit": config.data.unit,  # unit of `tokens` and `tokens_per_second`
        "best_val_loss": state.meta()["best_val_loss"],
        "val_loss": evaluation.loss if evaluation else None,
        "val_bits_per_byte": evaluation.bits_per_byte if evaluation else None,
        **({f"val_{name}": mean for name, mean in evaluation.means.items()} if evaluation else {}),
        **reporter.figures(),
        "world_size": run.mesh.world_size,
        "layout": run.layout,
        "pipeline": _pipeline(config, state),
        "wall_seconds": time.monotonic() - started,
        "checkpoint": str(outcome.checkpoint) if outcome and outcome.checkpoint else None,
    }


def _pipeline(config: Config, state: TrainState) -> dict[str, Any] | None:
    """Return the data for a timeline of the pipeline; None without a pipeline.

    `stage_flops` has the FLOPs per token, forward and backward, of each stage. The last stage includes the head.
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
    """Generate the sample on all ranks; on rank 0, print the results and the next commands."""
    duration = format_duration(time.monotonic() - started)  # without the sample, as in result.json
    if outcome.ending is Ending.done:
        try:
            _sample(config, run, state)
        except Exception as error:  # of the tokenizer, on all ranks alike; the report does not depend on the sample
            run.log(f"warning: no sample: {one_line(error)}")
    if not run.mesh.is_main:
        return
    steps = state.steps_until(config.trainer.max_steps)
    lines = [("ended", f"{outcome.ending.value}, step {state.step} of {steps}, {duration}")]
    if (best := state.meta()["best_val_loss"]) is not None:
        lines.append(("best validation", f"{best:.4f} nats per {config.data.unit.removesuffix('s')}"))
    if outcome.evaluation is not None:
        bits = outcome.evaluation.bits_per_byte
        metrics = [f"{outcome.evaluation.loss:.4f} nats per {config.data.unit.removesuffix('s')}"]
        metrics += [] if bits is None else [f"{bits:.4f} bits per byte"]
        metrics += [f"{name} {mean:.4f}" for name, mean in outcome.evaluation.means.items()]
        lines.append(("last validation", ", ".join(metrics)))
    if reporter.spikes:
        steps = ", ".join(str(each["step"]) for each in reporter.spikes)
        skipped = sum(each["skipped_to"] - each["skipped_from"] for each in reporter.spikes)
        lines.append(("loss spikes", f"{len(reporter.spikes)}, at step {steps}; {counted(skipped, 'sample')} skipped"))
    lines += [line for observer in reporter.observers for line in observer.closing()]
    more = [as_override(config.plugins)] if config.plugins else []
    if outcome.ending is Ending.done:
        more.append(config.trainer.doubled)
    if outcome.ending is Ending.stop_step:
        more.append("trainer.stop_step=null")
    run.log(banner(lines, title="results"))
    # Not in the banner, which wraps long lines: a wrapped command cannot be copied.
    resume = f"{launched_command()} {shlex.join([f'run.dir={hydra_value(str(run.path))}', *more])}"
    run.log(f"resume:    {resume}")
    if outcome.ending is Ending.done and (rise := _rise(config, min(int(state.clock), config.trainer.max_steps))):
        run.log(f"           {rise}")
    if capability(state.model.spec, TextGeneration) is not None:
        prompt = config.trainer.sample_prompt.strip()
        options = [f"checkpoint={command_value(str(run.path))}"]
        options += [f"prompt={prompt}"] if prompt else []
        options += [as_override(config.plugins)] if config.plugins else []
        run.log(f"generate:  {command('generate')} {shlex.join(options)}")


def _rise(config: Config, step: int) -> str:
    """Return a remark if the learning rate would rise when max_steps doubles, else ""."""
    steps, lr = config.trainer.max_steps, config.optimizer.lr
    now, then = (lr * Schedule(config.schedule, each).factor(at) for each, at in ((steps, step - 1), (2 * steps, step)))
    if then <= 1.1 * now:
        return ""
    return f"(this stretches the schedule: the learning rate rises from {now:.1e} to {then:.1e})"


def _sample(config: Config, run: RunFolder, state: TrainState) -> None:
    tokenizer, trainer = run.tokenizer, config.trainer
    writer = capability(state.model.spec, TextGeneration)
    if writer is None or tokenizer is None or not trainer.sample_prompt or not trainer.sample_tokens:
        return
    prompt = tokenizer.prompt(trainer.sample_prompt)
    decoder = StreamDecoder(tokenizer)
    sampling = Sampling(seed=config.seed)
    if run.mesh.is_main:
        run.log(banner([], title="sample").splitlines()[0])
    # Compiled blocks would be recompiled for every length of the KV cache.
    with torch.compiler.set_stance("force_eager"):
        count = trainer.sample_tokens
        tokens = writer.generate(state.runner, prompt, count, sampling, stop=tokenizer.eod, cache=True)
        text = "".join([decoder.push(token) for token in tokens]) + decoder.flush()
    if run.mesh.is_main:
        run.log(trainer.sample_prompt.strip("\n") + text)
