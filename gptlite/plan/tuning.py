"""Measurement of a plan's layouts: each trains for a few steps as train.py would train it, in its own processes."""

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

from gptlite.config import hydra_value
from gptlite.files import write_whole
from gptlite.invocation import command
from gptlite.metrics.console import format_count
from gptlite.plan.pictures import make_folder
from gptlite.plan.planning import Plan, overrides, train_overrides
from gptlite.plan.search import Candidate, distinct

TRIED = 3  # layouts available for each one to be measured, in case some fail
STOP_SECONDS = 20.0  # grace period of a run before it is killed
# Only steps are timed: the first rows are warm-up, the median of the others is the speed.
BARE = ("trainer.eval_interval=0", "trainer.eval_samples=1", "trainer.sample_tokens=0", "trainer.log_interval=1")
BARE_SAVING = ("checkpoint.interval=0", "checkpoint.resume=never", "logger=jsonl")


@dataclass(frozen=True)
class Trial:
    """The measured tokens per second of a candidate, or 0 and the reason."""

    candidate: Candidate
    tokens_per_second: float
    reason: str
    seconds: float


def tune(plan: Plan, preset: Path, k: int, steps: int, limit: float) -> int:
    """Measure the plan's best `k` layouts, or the next ones if none of them runs; write the best as a preset.

    Returns the exit code: 1 if no layout ran. Raises ConfigError if the preset cannot be written.
    """
    make_folder(preset.parent.parent)
    preset.parent.mkdir(exist_ok=True)
    given, trials = plan.config.run.overrides, list[Trial]()
    with tempfile.TemporaryDirectory(prefix="gptlite-tune-") as name:
        for candidate in _in_order(plan, k):
            if len(trials) >= k and any(trial.tokens_per_second for trial in trials):
                break
            trials.append(measured(candidate, given, Path(name) / str(len(trials)), steps, limit))
            print(_line(len(trials), trials[-1]), flush=True)
    best = max(trials, key=lambda trial: trial.tokens_per_second)
    ran = best.tokens_per_second > 0
    candidate = best.candidate if ran else plan.best
    result = (
        f"{format_count(best.tokens_per_second)} {plan.best.work.unit}/s over {steps} steps"
        if ran
        else "predicted, never run"
    )
    micro = f"data.micro_batch_size={candidate.work.micro_batch_size}"
    keys = [each for each in train_overrides(given, candidate.work) if each.startswith("parallelism.")]
    lines = [
        f"# {candidate.words}: {result}, {time.strftime('%Y-%m-%d')}.",
        f"# With {micro}, on the command line.",
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
    print(f"{'the best' if ran else 'no layout ran; the best by the plan'}: {candidate.words}")
    words = ["--config-dir", str(preset.parent.parent), f"parallelism={preset.stem}", micro]
    kept = [each for each in given if not each.startswith(("parallelism", "cluster", "data.micro_batch_size"))]
    print(f"{command('train')} {shlex.join([*words, *kept])}")
    return 0 if ran else 1


def measured(candidate: Candidate, given: Sequence[str], folder: Path, steps: int, limit: float) -> Trial:
    """Train one candidate in its own process, for at most `limit` seconds."""
    last = [f"trainer.max_steps={steps}", "trainer.max_epochs=null", f"run.dir={hydra_value(str(folder))}"]
    arguments = [*BARE, *BARE_SAVING, *train_overrides(given, candidate.work), *last]
    started = time.monotonic()
    # The run must not outlive this process: the kernel kills it when its parent ends.
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
        with suppress(OSError, ValueError, KeyError):
            speed = json.loads((folder / "result.json").read_text(encoding="utf-8"))["tokens_per_second"] or 0.0
    except subprocess.TimeoutExpired:
        reason = f"not done within {limit / 60:g} minutes"
    finally:  # after Ctrl-C too: the run's ranks must not outlive this process
        if run.poll() is None:
            _end(run)
    return Trial(candidate, 0.0 if reason else speed, reason, time.monotonic() - started)


def _in_order(plan: Plan, k: int) -> list[Candidate]:
    """Return the plan's layouts in the order to try: the distinct ones, and last the one with the least memory."""
    order = distinct(plan.found, TRIED * k)
    thriftiest = min(plan.found.ranked, key=lambda each: each.prediction.memory.total)
    return order if thriftiest in order else [*order, thriftiest]


def _line(number: int, trial: Trial) -> str:
    predicted = format_count(trial.candidate.prediction.tokens_per_second)
    result = (
        trial.reason or f"{format_count(trial.tokens_per_second)} {trial.candidate.work.unit}/s (predicted {predicted})"
    )
    return f"{number}: {trial.candidate.words}: {result}, {trial.seconds:.0f} s"


def _reason(errors: str, code: int) -> str:
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    first = next((line for line in lines if line.startswith(("error:", "rank "))), lines[-1] if lines else "")
    return (first or f"ended with exit code {code}").removeprefix("error: ")


def _end(run: subprocess.Popen[str]) -> None:
    """End a run with its ranks: by SIGTERM, then by SIGKILL."""
    run.terminate()
    try:
        run.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        run.kill()
        run.communicate()
