"""All ranks of any layout go back together, and skip the samples that one process skips."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from run_files import read_metrics
from torch import Tensor

from distributed.cells.reshard_pairs import SINGLE
from distributed.cells.run import Ranks
from distributed.cells.steps import joined
from distributed.test_continue import CLOSE, Run, other
from gptlite.checkpoint.manifest import read_manifest
from gptlite.config import Config, load
from gptlite.models.gpt.model import GPT
from gptlite.start.pretrain import pretrain

BAD = 50  # its loss is not finite
HIGH = (192, 216)  # the loss of micro-batches of these samples is doubled


def train(config: Config, world: int, name: str) -> int | None:
    """On the first `world` ranks: the exit code of `pretrain`."""
    original = GPT.forward

    def forward(self: GPT, x: Tensor, targets: Tensor, sample_ids: Tensor | None = None, **more: Any) -> Tensor:
        out = original(self, x, targets, sample_ids, **more)
        if self.head is None or sample_ids is None or not torch.is_grad_enabled():
            return out
        high = ((sample_ids >= HIGH[0]) & (sample_ids < HIGH[1])).all()
        return out * (math.inf if (sample_ids == BAD).any() else 2.0 if high else 1.0)

    with joined(world, name) as is_in, patch.object(GPT, "forward", forward):
        return pretrain(config).exit_code if is_in else None


# Of 12 samples a step, the 5th has the one that is not finite; without it, the 16th and the 17th are high.
SPIKE = [
    "trainer.max_steps=22", "schedule.warmup_steps=21", "trainer.eval_interval=0",
    "checkpoint.interval=4", "checkpoint.keep=2", "trainer.spike.policy=skip", "trainer.spike.window=8",
    "trainer.spike.patience=2", "trainer.spike.margin=0",
]  # fmt: skip
LAYOUTS = [
    other(data=2, zero=3, micro=3),
    other(data=2, zero=1, micro=6),
    other(tensor=2, micro=6),
    other(pipeline=2, micro=3),
]


@pytest.mark.slow
def test_every_layout_goes_back_as_one_process_does(tmp_path: Path):
    found = {}
    with Ranks(2, join=False) as ranks:
        for run in (Run(SINGLE, 12), *LAYOUTS):
            folder = tmp_path / run.id
            config = load([*run.overrides(), *SPIKE, f"run.dir={folder}"])
            arguments = (config, run.layout.world, uuid.uuid4().hex)
            codes = ranks.run("distributed.test_spike_ranks:train", *arguments, timeout=250)
            assert codes[: run.layout.world] == [0] * run.layout.world
            found[run.id] = folder
    whole, *others = found.values()
    skipped = read_manifest(whole / "checkpoints" / "step-00000022").meta["skipped_samples"]
    assert skipped == [[48, 60], [192, 216]]
    losses = {row["step"]: row["loss"] for row in read_metrics(whole) if "loss" in row}
    assert list(losses) == list(range(1, 23))
    for folder in others:
        assert read_manifest(folder / "checkpoints" / "step-00000022").meta["skipped_samples"] == skipped
        ours = {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
        assert ours == pytest.approx(losses, rel=CLOSE)
