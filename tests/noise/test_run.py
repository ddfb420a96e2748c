"""Runs that measure the noise of their gradients, and AdaScale: its rate, its clock, its end, and what resumes."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from run_files import differing, meta, read_metrics

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.schedule_config import CosineConfig
from gptlite.parallelism import pipeline
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.noise.build import Noise
from gptlite.satellites.parity.record import build

ADASCALE = [
    "optimizer=sgd", "optimizer.lr=0.3", "optimizer.adascale=true", "data.micro_batch_size=1", "schedule=cosine",
    "schedule.warmup_steps=2", "trainer.log_interval=1", "model.num_layers=1",
]  # fmt: skip


def curve(folder: Path) -> list[dict]:
    keys = "step", "loss", "grad_norm", "lr", "gain", "clock", "noise_scale"
    return [{key: row.get(key) for key in keys} for row in read_metrics(folder) if "loss" in row]


def test_rate_clock_and_end_follow_the_gain(run: Callable, tmp_path: Path) -> None:
    assert run("a", *ADASCALE, "trainer.max_steps=30", "trainer.eval_interval=4")[0] == 0
    rows, schedule, clock = curve(tmp_path / "a"), Schedule(CosineConfig(warmup_steps=2), 30), 0.0
    for row in rows:
        assert 1 <= row["gain"] <= 4
        assert row["lr"] == pytest.approx(0.3 * row["gain"] * schedule.factor(int(clock)), rel=1e-12)
        clock += row["gain"]
        assert row["clock"] == pytest.approx(clock, rel=1e-12)
    assert rows[-2]["clock"] < 30 <= rows[-1]["clock"]
    assert 30 / 4 <= len(rows) < 30
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert (result["status"], result["step"], result["clock"]) == ("done", len(rows), rows[-1]["clock"])
    evaluated = [row["step"] for row in read_metrics(tmp_path / "a") if "val_loss" in row]
    assert evaluated == sorted({*range(4, len(rows) + 1, 4), len(rows)})
    log = (tmp_path / "a" / "train.log").read_text()
    assert f"done, step {len(rows)} of {len(rows)}" in log
    # It is complete, although its number of steps is below trainer.max_steps.
    assert run("a", *ADASCALE, "trainer.max_steps=30", "trainer.eval_interval=4")[0] == 0
    assert curve(tmp_path / "a") == rows


@pytest.mark.parametrize("more", [[], ["optimizer.adascale_base=2", "data.batch_ramp=[2,1,20]"]])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(run: Callable, tmp_path: Path, more) -> None:
    words = [*ADASCALE, *more, "trainer.max_steps=24", "checkpoint.interval=3", "checkpoint.keep=0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("whole", *words)[0] == 0
    last = curve(whole)[-1]["step"]
    assert last > 6
    shutil.copytree(whole, parts)
    for folder in (parts / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 3:
            shutil.rmtree(folder)
    assert run("parts", *words)[0] == 0
    assert "resuming from" in (parts / "train.log").read_text()
    assert curve(whole) == curve(parts)
    assert differing(whole, parts, last) == []
    assert meta(whole, last) == meta(parts, last)


def test_measuring_changes_no_number(run: Callable, tmp_path: Path) -> None:
    words = ["data.micro_batch_size=2", "trainer.max_steps=4", "model.num_layers=1"]
    run("without", *words)
    run("with", *words, "trainer.noise_scale=true")
    rows = curve(tmp_path / "with")
    assert all(row["clock"] is None for row in rows)
    assert any(row["noise_scale"] for row in rows)
    for row in rows:
        row["noise_scale"] = None
    assert rows == curve(tmp_path / "without")
    assert differing(tmp_path / "with", tmp_path / "without", 4) == []
    assert "noise" not in meta(tmp_path / "without", 4)


@pytest.mark.parametrize("options", ["precision=fp32", "precision=bf16", "precision=bf16_stochastic"])
def test_what_is_read_is_what_each_micro_batch_adds(tiny: list[str], options: str) -> None:
    words = [*tiny, "run.dir=unused", "run.name=x", "trainer.noise_scale=true", "data.micro_batch_size=1", options]
    state, step = build(load(words), Mesh(torch.device("cpu")))
    before: list[list[torch.Tensor]] = []
    (part,) = state.parts

    def gradients() -> list[torch.Tensor]:
        none = torch.zeros(())
        return [none if p.grad is None else p.grad.double().clone() for p in part.parameters()]

    with (
        closing(state.loader),
        mock.patch.object(pipeline, "before_backward", side_effect=lambda *_, **__: before.append(gradients())),
    ):
        result = step(state, inspect=lambda _: before.append(gradients()))
    assert len(before) == 5
    differences = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(before)]
    squares = sum(float((part**2).sum()) for parts in differences for part in parts)
    assert isinstance(state.noise, Noise)
    estimate = state.noise.estimate
    # With equal groups, sum |c_i|^2 is that of the mean's square over N, and of the noise.
    noise = estimate.variance / 4
    assert estimate.square / 4 + noise == pytest.approx(squares, rel=1e-4)
    assert estimate.square + noise == pytest.approx(result.grad_norm**2, rel=1e-5)


S = "optimizer=sgd optimizer.adascale=true"
REFUSED = {
    f"{S} data.micro_batch_size=4 parallelism.data=1": r"optimizer\.adascale=true .* data\.micro_batch_size=1 or 2",
    f"{S} parallelism.context=2": r"parallelism\.context=1",
    f"{S} parallelism.data=1 data.micro_batch_size=1 parallelism.offload=cpu": r"parallelism\.offload=none",
    f"{S} optimizer.adascale_base=5": r"optimizer\.adascale_base=5 must be from 1 to data\.global_batch_size=4",
    "optimizer=sgd optimizer.adascale_base=2": r"without optimizer\.adascale=true",
    "trainer.noise_scale=true parallelism.data=1 data.micro_batch_size=4": r"trainer\.noise_scale=true .*=false",
    "trainer.noise_scale=true parallelism.data=1 parallelism.pipeline=2 model.num_layers=4 data.micro_batch_size=1 "
    "parallelism.schedule=zero_bubble": r"parallelism\.schedule=1f1b",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_name_the_key_and_the_fix(tiny: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[words]):
        load([*tiny, "run.dir=unused", *words.split()])


def test_one_group_is_refused_when_the_number_of_ranks_is_known(run: Callable, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.micro_batch_size=1 or 2"):
        run("a", "trainer.noise_scale=true", "data.micro_batch_size=4")
    assert not (tmp_path / "a").exists()
