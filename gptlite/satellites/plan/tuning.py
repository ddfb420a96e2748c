"""Measurement of the best layouts of a plan: each trains for a few steps in separate processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from gptlite.config.overrides import hydra_value
from gptlite.documents import read_json
from gptlite.files import write_whole
from gptlite.invocation import command
from gptlite.metrics.console import format_count
from gptlite.progress import format_duration
from gptlite.satellites.plan.pictures import make_folder
from gptlite.satellites.plan.planning import Plan, overrides, train_overrides
from gptlite.satellites.plan.search import Candidate, distinct

TRIED = 3  # candidates per layout to measure, in case some of them fail
STOP_SECONDS = 20.0  # from SIGTERM to SIGKILL of a run
# Overrides that leave only training steps to time. The speed is the median of the logged steps after the warm-up.
BARE = ("trainer.eval_interval=0", "trainer.eval_samples=1", "trainer.sample_tokens=0", "trainer.log_interval=1")
BARE_SAVING = ("checkpoint.interval=0", "checkpoint.resume=never", "logger=jsonl")


class _Speed(TypedDict, total=False):
    tokens_per_second: float | None


@dataclass(frozen=True)
class Trial:
    """Measurement of a candidate: tokens or samples per second, or 0 and the reason of the failure.

    `seconds` is the duration of the whole run, including its startup.
    """

    candidate: Candidate
    tokens_per_second: float
    reason: str
    seconds: float


def tune(plan: Plan, preset: Path, k: int, steps: int, limit: float) -> int:
    """Measure the plan's best `k` layouts, or the next layouts if none of these runs; write the fastest as a preset.

    Writes the measurements to a JSON file of the same name. `steps` is the length of a run, `limit` its time limit in
    seconds. Returns the exit code, 1 if no layout ran. Raises ConfigError if the preset cannot be written.
    """
    make_folder(preset.parent.parent)
    preset.parent.mkdir(exist_ok=True)
    original, trials = plan.config.run.overrides, list[Trial]()
    with tempfile.TemporaryDirectory(prefix="gptlite-tune-") as name:
        for candidate in _in_order(plan, k):
            if len(trials) >= k and any(trial.tokens_per_second for trial in trials):
                break
            trials.append(measured(candidate, original, Path(name) / str(len(trials)), steps, limit))
            print(_line(len(trials), trials[-1]), flush=True)
    best = max(trials, key=lambda trial: trial.tokens_per_second)
    ran = best.tokens_per_second > 0
    candidate = best.candidate if ran else plan.best
    result = (
        f"{format_count(best.tokens_per_second)} {plan.best.work.unit}/s over {steps} steps"
        if ran
        else "predicted, not measured"
    )
    micro = f"data.micro_batch_size={candidate.work.micro_batch_size}"
    keys = [each for each in train_overrides(original, candidate.work) if each.startswith("parallelism.")]
    lines = [
        f"# {candidate.words}: {result}, {time.strftime('%Y-%m-%d')}.",
        f"# Use it with {micro} on the command line.",
        "defaults: [parallelism_schema, _self_]",
        *(each.removeprefix("parallelism.").replace("=", ": ", 1) for each in keys),
    ]
    write_whole(preset, "\n".join(lines) + "\n")
    rows = [
        {
            "layout": trial.candidate.words,
            "overrides": overrides(trial.candidate.work),
            "tokens_per_second": trial.tokens_per_second or None,
            "predicted": trial.candidate.prediction.tokens_per_second,
            "reason": trial.reason,
        }
        for trial in trials
    ]
    write_whole(preset.with_suffix(".json"), json.dumps(rows, indent=2) + "\n")
    print(f"{'the best' if ran else 'no layout ran; the fastest predicted'}: {candidate.words}")
    words = ["--config-dir", str(preset.parent.parent), f"parallelism={hydra_value(preset.stem)}", micro]
    kept = [each for each in original if not each.startswith(("parallelism", "cluster", "data.micro_batch_size"))]
    print(f"{command('train')} {shlex.join([*words, *kept])}")
    return 0 if ran else 1


def measured(candidate: Candidate, given: Sequence[str], folder: Path, steps: int, limit: float) -> Trial:
    """Train one candidate in a separate process, for at most `limit` seconds, with `folder` as the run folder."""
    last = [f"trainer.max_steps={steps}", "trainer.max_epochs=null", f"run.dir={hydra_value(str(folder))}"]
    arguments = [*BARE, *BARE_SAVING, *train_overrides(given, candidate.work), *last]
    started = time.monotonic()
    # With `die_with` the kernel kills the run when this process ends, even by SIGKILL.
    start = (
        f"from gptlite.launch.worker import die_with; die_with({os.getpid()}); "
        "from gptlite.commands.train import main; main()"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", start, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    speed = 0.0
    try:
        _, errors = run.communicate(timeout=limit)
        reason = _reason(errors, run.returncode) if run.returncode else ""
        with suppress(OSError, ValueError):
            speed = read_json(folder / "result.json", _Speed).get("tokens_per_second") or 0.0
    except subprocess.TimeoutExpired:
        reason = f"not finished within {limit / 60:g} minutes"
    finally:  # also after Ctrl-C
        if run.poll() is None:
            _end(run)
    return Trial(candidate, 0.0 if reason else speed, reason, time.monotonic() - started)


def _in_order(plan: Plan, k: int) -> list[Candidate]:
    """Return the layouts to measure in order: the fastest of each combination of degrees and ZeRO stage, and finally
    the layout with the least memory, which is the most likely to run."""
    order = distinct(plan.found, TRIED * k)
    thriftiest = min(plan.found.ranked, key=lambda each: each.prediction.memory.total)
    return order if thriftiest in order else [*order, thriftiest]


def _line(number: int, trial: Trial) -> str:
    predicted = format_count(trial.candidate.prediction.tokens_per_second)
    result = (
        trial.reason or f"{format_count(trial.tokens_per_second)} {trial.candidate.work.unit}/s (predicted {predicted})"
    )
    return f"{number}: {trial.candidate.words}: {result}, {format_duration(trial.seconds)}"


def _reason(errors: str, code: int) -> str:
    """Return the line of a failed run's standard error that explains the failure, or the exit code if it is empty."""
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    first = next((line for line in lines if line.startswith(("error:", "rank "))), lines[-1] if lines else "")
    return (first or f"ended with exit code {code}").removeprefix("error: ")


def _end(run: subprocess.Popen[str]) -> None:
    """Stop a run and its ranks with SIGTERM, and after STOP_SECONDS with SIGKILL."""
    run.terminate()
    try:
        run.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        run.kill()
        run.communicate()
