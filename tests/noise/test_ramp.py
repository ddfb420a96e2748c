"""Batches that grow with the noise scale: the rule, the samples of each step, and what resumes, rewinds and lags."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from run_files import differing, meta, read_metrics

from gptlite.config import load
from gptlite.data.batches import BatchSchedule, batch_schedule
from gptlite.data.loader import Batch, Loader
from gptlite.data.order_log import read_order, row_of_step
from gptlite.errors import ConfigError
from gptlite.satellites.noise.estimate import NoiseEstimate, mean_and_noise
from gptlite.satellites.noise.ramp import NoiseRamp
from gptlite.trainer.trainer import Trainer

RAMP = [
    "data.batch_ramp=[2,2]", "data.global_batch_size=12", "data.micro_batch_size=1", "data.ramp_steps=3",
    "data.ramp_factor=0.02", "trainer.noise_scale=true", "trainer.max_steps=24", "trainer.eval_interval=0",
    "model.num_layers=1", "trainer.sample_tokens=0",
]  # fmt: skip
SPIKE = [
    "trainer.spike.policy=skip", "trainer.spike.window=8", "trainer.spike.patience=1", "trainer.spike.threshold=2",
    "trainer.spike.rise=0.5", "checkpoint.interval=7", "checkpoint.keep=0",
]  # fmt: skip


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The samples of each step that begins, in order."""
    steps, real = [], Loader.batch

    def batch(self: Loader, consumed_samples: int, micro_index: int) -> Batch:
        given = real(self, consumed_samples, micro_index)
        steps.extend([[]] if micro_index == 0 else [])
        steps[-1].extend(given.sample_ids.tolist())
        return given

    monkeypatch.setattr(Loader, "batch", batch)
    return steps


def curve(folder: Path) -> list[dict[str, Any]]:
    keys = "step", "loss", "grad_norm", "lr", "tokens", "noise_scale", "batch_size", "gain"
    return [{key: row.get(key) for key in keys} for row in read_metrics(folder) if "loss" in row]


def ramped(start: int, increment: int, most: int, factor: float, interval: int) -> tuple[NoiseRamp, Iterator[int]]:
    """A rule, and an iterator that begins a step and gives its size."""
    loader: Any = SimpleNamespace(schedule=batch_schedule(most, [start, increment]))

    def sizes() -> Iterator[int]:
        position = 0
        while True:
            schedule: BatchSchedule = loader.schedule
            yield schedule.size(position)
            position = schedule.after(position)

    return NoiseRamp(loader, factor, interval), sizes()


def test_the_batch_grows_up_to_the_known_noise_scale_of_a_simulation() -> None:
    """Gradients of a quadratic model in float64, whose noise scale is 12 at first, and 24 from step 600 on."""
    generator, mean = np.random.default_rng(3), np.full(50, 0.5)
    ramp, sizes = ramped(2, 2, 64, 1.0, 25)
    estimate, consumed, seen = NoiseEstimate(), 0, []
    for step in range(1, 1201):
        size, groups = next(sizes), 2
        seen.append(size)
        deviation = np.sqrt((12 if step <= 600 else 24) * 0.25)
        parts = [mean / groups + deviation * generator.normal(size=50) * np.sqrt(size / groups) / size for _ in "12"]
        squares, whole = sum((part**2).sum() for part in parts), (sum(parts) ** 2).sum()
        estimate.add(*mean_and_noise(squares, whole, 1 / 2), size, groups)
        consumed += size
        ramp.decide(estimate, step, consumed)
    changes = [step for step in range(2, 1201) if seen[step - 1] != seen[step - 2]]
    assert {step % 25 for step in changes} == {2}  # the step after the one that follows a decision
    assert all(seen[step - 1] - seen[step - 2] == 2 for step in changes)
    assert 10 <= seen[599] <= 16
    assert 20 <= seen[1199] <= 28
    assert changes[-1] > 12 * 25


LOST = [(9, 1, True), (8, 1, False), (1, -1, True), (-1, -1, False), (float("nan"), 1, False)]


@pytest.mark.parametrize(("variance", "square", "grows"), LOST)
def test_a_mean_that_is_lost_in_the_noise_asks_for_more_samples(variance: float, square: float, grows: bool) -> None:
    ramp, _ = ramped(4, 4, 8, 2.0, 5)
    ramp.decide(NoiseEstimate(variance, square, 1.0), 4, 16)
    assert ramp.grown == ()
    ramp.decide(NoiseEstimate(variance, square, 1.0), 5, 20)
    assert ramp.grown == (((24, 8),) if grows else ())
    ramp.decide(NoiseEstimate(1e9, 1, 1.0), 10, 60)
    assert ramp.grown[-1][1] == 8  # the largest


def test_every_step_reads_the_batch_that_the_noise_before_it_asks_for(run: Callable, tmp_path: Path, fed) -> None:
    assert run("a", *RAMP)[0] == 0
    rows, size, later = curve(tmp_path / "a"), 2, 2
    assert len({row["batch_size"] for row in rows}) > 3
    for row in rows:
        assert row["batch_size"] == size
        size = later
        if row["step"] % 3 == 0 and size < 12 and row["noise_scale"] > 0.02 * size:
            later = size + 2
    assert [len(samples) for samples in fed] == [row["batch_size"] for row in rows]
    assert list(chain.from_iterable(fed)) == list(range(sum(row["batch_size"] for row in rows)))
    assert [row["tokens"] for row in rows] == np.cumsum([32 * row["batch_size"] for row in rows]).tolist()
    order = read_order(tmp_path / "a")
    for step, samples in enumerate(fed, 1):
        row = row_of_step(order, step)
        assert row is not None
        assert row.schedule().samples(row.first_sample(step)).tolist() == samples
    log = (tmp_path / "a" / "train.log").read_text()
    assert "ramp from 2 in steps of 2 while below the noise scale" in " ".join(log.split())
    assert f"step 24/24  batch {rows[-1]['batch_size']}  loss" in log
    assert json.loads((tmp_path / "a" / "result.json").read_text())["batch_size"] == rows[-1]["batch_size"]


ADASCALE = ["optimizer=sgd", "optimizer.lr=0.3", "optimizer.adascale=true", "trainer.noise_scale=false"]


@pytest.mark.parametrize("more", [[], pytest.param(ADASCALE, marks=pytest.mark.slow)], ids=["adamw", "adascale"])
def test_a_run_resumed_at_any_step_repeats_the_uninterrupted_one_bit_for_bit(
    run: Callable, tmp_path: Path, more: list[str]
) -> None:
    words = [*RAMP, *more, "trainer.max_steps=12", "checkpoint.interval=1", "checkpoint.keep=0"]
    whole = tmp_path / "whole"
    assert run("whole", *words)[0] == 0
    rows = curve(whole)
    last = rows[-1]["step"]
    decided = next(row["step"] for row in rows if row["batch_size"] > 2) - 2
    for step in (decided, decided + 2):  # before and after the first larger batch
        parts = shutil.copytree(whole, tmp_path / f"parts-{step}")
        for folder in (parts / "checkpoints").glob("step-*"):
            if int(folder.name[5:]) > step:
                shutil.rmtree(folder)
        assert run(parts.name, *words)[0] == 0
        assert "resuming from" in (parts / "train.log").read_text()
        assert curve(parts) == rows
        assert differing(whole, parts, last) == []
        assert meta(whole, last) == meta(parts, last)
        order, again = read_order(whole), read_order(parts)
        for number in range(step + 1, last + 1):
            row, other = row_of_step(order, number), row_of_step(again, number)
            assert row is not None
            assert other is not None
            assert (other.first_sample(number), other.global_batch_size) == (
                row.first_sample(number), row.global_batch_size
            )  # fmt: skip


def test_a_step_whose_result_is_read_late_has_the_same_batch(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; evaluations and saves, before which all results are read, change nothing."""
    found = []
    for lag, more in [(0, []), (1, []), (1, ["trainer.eval_interval=3", "checkpoint.interval=4"])]:
        monkeypatch.setattr(sys.modules["gptlite.pretrain"], "Trainer", partial(Trainer, lag=lag))
        name = f"run-{len(found)}"
        assert run(name, *RAMP, *more)[0] == 0
        found.append((curve(tmp_path / name), meta(tmp_path / name, 24)["noise"]))
        assert differing(tmp_path / name, tmp_path / "run-0", 24) == []
    assert found[0][1]["grown"]
    assert found[0] == found[1] == found[2]


def test_a_rewind_restores_the_size(run: Callable, tmp_path: Path, fed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spike is in a step whose batch was decided after the checkpoint."""
    words, real = [*RAMP, *SPIKE, "data.ramp_steps=5"], Loader.batch
    poison: list[int] = []

    def batch(self: Loader, consumed_samples: int, micro_index: int) -> Batch:
        given = real(self, consumed_samples, micro_index)
        if set(given.sample_ids.tolist()) & set(poison):
            given.targets[:] = torch.randint(128, 256, given.targets.shape, generator=torch.Generator().manual_seed(1))
        return given

    monkeypatch.setattr(Loader, "batch", batch)
    assert run("calm", *words)[0] == 0
    rows = curve(tmp_path / "calm")
    calm = list(fed)
    spiked = next(row["step"] for row in rows if row["step"] > 16 and row["batch_size"] > rows[13]["batch_size"])
    poison += calm[spiked - 1]
    fed.clear()
    assert run("spiked", *words)[0] == 0
    assert "spike at step" in (tmp_path / "spiked" / "train.log").read_text()
    assert fed[:spiked] == calm[:spiked]
    again = fed[spiked:]  # from step 15 on
    assert len(again) == 24 - 14
    assert [len(samples) for samples in again[:2]] == [len(samples) for samples in calm[14:16]]
    skipped = meta(tmp_path / "spiked", 24)["skipped_samples"]
    gone = {number for first, stop in skipped for number in range(first, stop)}
    assert gone >= set(poison)
    assert list(chain.from_iterable(calm[:14] + again)) == [n for n in range(again[-1][-1] + 1) if n not in gone]
    order = read_order(tmp_path / "spiked")
    for step, samples in enumerate(again, 15):
        row = row_of_step(order, step)
        assert row is not None
        assert row.schedule().samples(row.first_sample(step)).tolist() == samples


def test_other_micro_batches_go_on_with_the_size(run: Callable, tmp_path: Path) -> None:
    assert run("a", *RAMP, "trainer.stop_step=10")[0] == 0
    saved = meta(tmp_path / "a", 10)["noise"]["grown"]
    size = saved[-1][1]
    assert size > 2
    other = ["data.micro_batch_size=2", "data.batch_ramp=[4,4]", "data.global_batch_size=12"]
    assert run("a", *RAMP, *other, "trainer.stop_step=12")[0] == 0
    known = [[begin, max(4, each // 4 * 4)] for begin, each in saved]
    assert meta(tmp_path / "a", 12)["noise"]["grown"][: len(saved)] == known
    assert curve(tmp_path / "a")[-1]["batch_size"] == known[-1][1]


def test_a_run_without_the_ramp_goes_on_with_its_first_size(run: Callable, tmp_path: Path) -> None:
    fixed = ["data.batch_ramp=null", "data.ramp_steps=100", "data.ramp_factor=1"]
    assert run("a", *RAMP, *fixed, "trainer.stop_step=3")[0] == 0
    assert "grown" not in meta(tmp_path / "a", 3)["noise"]
    assert run("a", *RAMP, "trainer.stop_step=5")[0] == 0
    assert [row["tokens"] // 32 for row in curve(tmp_path / "a")] == [12, 24, 36, 38, 40]


ON = "trainer.noise_scale=true data.global_batch_size=12 data.batch_ramp=[2,2]"
REFUSED = {
    "data.batch_ramp=[2,2]": r"data\.batch_ramp=\[2, 2\] gives no number of samples.*set trainer\.noise_scale=true, or",
    f"{ON} data.ramp_factor=0": r"data\.ramp_factor=0\.0 must be above 0",
    f"{ON} data.ramp_factor=inf": r"data\.ramp_factor=inf must be above 0 and finite",
    f"{ON} data.ramp_steps=0": r"data\.ramp_steps=0 must be at least 1",
    f"{ON} trainer.max_epochs=2": r"trainer\.max_epochs=2 .* use trainer\.max_steps",
    "trainer.noise_scale=true data.ramp_steps=7": r"data\.ramp_steps=7 has no effect without data\.batch_ramp=\[first",
    "data.ramp_factor=2 data.ramp_steps=7": r"ramp_factor=2\.0 data\.ramp_steps=7 has .*r=1\.0 data\.ramp_steps=100$",
    "data.batch_ramp=[2,2,9] data.ramp_factor=2": r"data\.ramp_factor=2\.0 has no effect .*data\.ramp_factor=1\.0",
    f"{ON} parallelism.data=1 data.micro_batch_size=2": (
        r"first size of data\.batch_ramp=\[2, 2\] .* data\.micro_batch_size=1"
    ),
    f"{ON} parallelism.context=2": r"parallelism\.context=1",
    f"{ON} parallelism.data=2 data.micro_batch_size=2": r"includes a global batch size of 2, which is not divisible",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_name_the_key_and_the_fix(tiny: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[words]):
        load([*(word for word in tiny if "max_steps" not in word), "run.dir=unused", *words.split()])
