"""What the forked processes do: one life of a run, which notes what it has reached in a journal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from checkpoint.destruction.points import Points
from run_files import without_plots

# As little of everything as there can be; a warm-up of one step, so that trainer.max_steps changes no number.
TINY = [
    *("data=synthetic", "data.vocab_size=64", "data.num_tokens=20000", "data.global_batch_size=4"),
    *("data.micro_batch_size=2", "model=gpt-lite", "model.num_layers=2", "model.num_heads=2", "model.d_model=32"),
    *("model.sequence_length=16", "schedule=constant", "schedule.warmup_steps=1", "precision=fp32"),
    *("trainer.max_steps=100000", "trainer.eval_samples=4", "trainer.eval_interval=0", "trainer.sample_tokens=0"),
    *("trainer.log_interval=1", "run.name=x"),
]
JOIN_SECONDS = 60.0


def live(
    overrides: Sequence[str],
    journal: str,
    stage: str = "",
    index: int = 0,
    act: str = "kill",
) -> int:
    """Trains as train.py does and returns its exit code; at the `index`-th file operation of a stage, acts.

    The stage `step` is the end of a step. `act` is kill (this process), or `fill:BYTES:PATH`, which by a file of that
    name takes all the space there is but so many bytes.
    """
    from gptlite.commands.train import guarded
    from gptlite.config import load
    from gptlite.start.pretrain import pretrain
    from gptlite.trainer.signals import StopSignal

    torch.set_num_threads(1)
    config = load(overrides)
    notes = Journal(Path(journal))
    points = Points(Path(config.run.dir) / "checkpoints", stage, index, torn=act == "kill")

    def action() -> None:
        notes.write(f"hit {stage}")
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        _, space, path = act.split(":", 2)
        fill(Path(path), int(space))

    points.action = action
    points.install()
    notes.watch(points)

    def train() -> int:
        if "RANK" in os.environ:
            from gptlite.parallelism.process_group import join, leave_group

            join(JOIN_SECONDS)
            code = pretrain(config, stop_signal=StopSignal()).exit_code
            leave_group()
            return code
        return pretrain(config, stop_signal=StopSignal()).exit_code

    with without_plots():
        code = guarded(train)
    for name, count in points.counts.items():
        notes.write(f"count {name} {count}")
    notes.write(f"end {code}")
    return code


def fill(path: Path, leave: int = 0) -> None:
    """Writes a file until no more than `leave` bytes of the file system's space are free, or none."""
    page = bytes(4096)
    with open(path, "ab", buffering=0) as file, suppress(OSError):
        while True:
            space = os.fstatvfs(file.fileno())
            if leave and space.f_bavail * space.f_frsize <= leave:
                break
            file.write(page)


class Journal:
    """Lines that outlive the process: `WORD VALUE SECONDS`, the time of time.monotonic().

    `begin N` and `saved N` around each call of a save of step N, `step N` after each step, `hit STAGE` before what
    was asked for; at an end of its own, `count STAGE N` file operations.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write = os.write  # before it is wrapped
        self.write(f"start {os.getpid()}")

    def write(self, text: str) -> None:
        self._write(self._descriptor, f"{text} {time.monotonic()}\n".encode())

    def watch(self, points: Points) -> None:
        """Has steps and saves noted."""
        from gptlite.trainer.folder import RunFolder
        from gptlite.trainer.step import Step

        save, begin = RunFolder.save, Step.begin

        def saving(folder: RunFolder, state: Any) -> Path:
            self.write(f"begin {state.step}")
            path = save(folder, state)
            self.write(f"saved {state.step}")
            return path

        def stepping(step: Step, state: Any, *args: Any, **options: Any) -> Any:
            result = begin(step, state, *args, **options)
            self.write(f"step {state.step}")
            points.reach("step")
            return result

        RunFolder.save = saving  # type: ignore[method-assign]
        Step.begin = stepping  # type: ignore[method-assign]


def read_journal(path: Path) -> list[tuple[str, str, float]]:
    """The word, the rest and the time of each line."""
    lines = [line.rsplit(" ", 1) for line in path.read_text().splitlines()] if path.exists() else []
    return [(text.partition(" ")[0], text.partition(" ")[2], float(when)) for text, when in lines]


def wait_for(path: Path, start: str) -> str:
    """Waits until a journal has a line that starts so, and returns the rest of it."""
    deadline = time.monotonic() + 60
    while True:
        for word, rest, _ in read_journal(path):
            if f"{word} {rest}".startswith(start):
                return f"{word} {rest}".removeprefix(start)
        assert time.monotonic() < deadline, f"no {start} in {path}"
        time.sleep(0.005)
