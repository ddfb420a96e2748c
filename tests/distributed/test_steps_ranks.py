"""A step that is acted on a step later: all ranks act alike, and on the numbers they had without the lag."""

from __future__ import annotations

import hashlib
import json
import signal
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from marking import marked
from torch import Tensor

from distributed.cells.layouts import Cell
from distributed.cells.run import Ranks
from distributed.cells.steps import built
from gptlite.config import Config, load
from gptlite.parallelism.boxes import local_tensor
from gptlite.start.pretrain import pretrain
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.step import StepResult
from gptlite.trainer.steps import Steps
from gptlite.trainer.trainer import Trainer


def taken(config: Config, count: int, lag: int) -> tuple[list[StepResult], str]:
    """The results of the first steps, and a hash of this rank's parameters after them."""
    with built(config) as (_, state, step):
        steps, results = Steps(step, lag), []
        for number in range(count):
            steps.begin(state)
            while steps.ready(everything=number == count - 1):
                results.append(steps.take())
        digest = hashlib.sha256()
        for parameter in state.weights():
            digest.update(local_tensor(parameter).detach().contiguous().numpy().tobytes())
        return results, digest.hexdigest()


def stopped(overrides: list[str], lag: int, rank: int, at: int) -> tuple[int, int]:
    """Exit code and steps of a run in whose step `at` a signal reaches one rank."""
    stop, asked, words = StopSignal(), 0, Stopping.words

    def counted(self: Stopping) -> Tensor:
        nonlocal asked
        asked += 1
        if asked == at and dist.get_rank() == rank:
            stop.received = signal.SIGTERM
        return words(self)

    with patch.object(Stopping, "words", counted), patch("gptlite.pretrain.Trainer", partial(Trainer, lag=lag)):
        return pretrain(load(overrides), stop_signal=stop).exit_code, asked


FP16 = [
    "precision.initial_scale_power=20", "precision.hysteresis=1", "precision.loss_scale_window=4",
]  # fmt: skip
SAMPLES = 8  # of a step
CELLS = [
    (Cell(data=2, zero=1, accumulation=2), []),
    (Cell(pipeline=2, schedule="1f1b", accumulation=4), []),
    (Cell(tensor=2, accumulation=2, precision="fp16"), FP16),
    (Cell(data=2, zero=3, accumulation=2, precision="fp16"), FP16),
]


@pytest.mark.parametrize(("cell", "more"), marked(CELLS, quick=2, slow=2, name=lambda each: each[0].id))
def test_steps_are_the_same_steps(two: Ranks, cell: Cell, more: list[str]) -> None:
    micro = SAMPLES // (cell.data * cell.accumulation)
    small = ["model.num_layers=2", f"data.global_batch_size={SAMPLES}", f"data.micro_batch_size={micro}"]
    config = load([*cell.overrides(), *small, *more])
    count = 10 if more else 4  # so that the loss scale falls, and grows until it overflows again
    now, late = (two.run("distributed.test_steps_ranks:taken", config, count, lag, timeout=200) for lag in (0, 1))
    # Not compared as they are: the norm of a step that overflowed is nan.
    assert [(repr(results), digest) for results, digest in late] == [(repr(each), digest) for each, digest in now]
    results = now[0][0]
    assert [each.step for each in results] == list(range(1, count + 1))
    assert any(each.skipped for each in results) is bool(more)
    assert not all(each.skipped for each in results)


@pytest.mark.parametrize("lag", [0, 1])
def test_ranks_stop_after_the_same_step(two: Ranks, tmp_path: Path, lag: int) -> None:
    overrides = [
        *(each for each in Cell(data=2, zero=1).overrides() if not each.startswith(("run.", "trainer.max"))),
        *(f"run.dir={tmp_path}", "run.name=x", "trainer.max_steps=50", "trainer.eval_interval=0"),
        *("model.num_layers=2", f"data.global_batch_size={SAMPLES}", f"data.micro_batch_size={SAMPLES // 2}"),
    ]
    found = two.run("distributed.test_steps_ranks:stopped", overrides, lag, 1, 5, timeout=200)
    assert found == [(143, 5 + lag)] * 2
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 5 + lag
