"""Spikes: when a loss is one, and that a run goes on as if it had never read the samples that made it."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_files import differing, meta, read_metrics

from gptlite.config import load
from gptlite.config.trainer import SpikeConfig
from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import Batch, Loader
from gptlite.errors import ConfigError
from gptlite.trainer.spike import Spike, SpikeWatch

# 16 steps of 4 samples. The band is known after 8; two high losses in a row are a spike.
SPIKE = [
    "trainer.max_steps=16", "checkpoint.interval=5", "checkpoint.keep=2", "trainer.spike.policy=skip",
    "trainer.spike.window=8", "trainer.spike.patience=2", "trainer.spike.threshold=2", "trainer.spike.rise=0.5",
    "optimizer.lr=0.01", "model.dropout=0.1",
]  # fmt: skip
POISON = (48, 56)  # samples of steps 13 and 14
SKIPPED = (44, 56)  # with those of the step before


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Samples in these ranges have random targets: a list that a test may change."""
    ranges, real = [POISON], Loader.batch

    def batch(self: Loader, consumed_samples: int, micro_index: int) -> Batch:
        given = real(self, consumed_samples, micro_index)
        for row, number in enumerate(given.sample_ids.tolist()):
            if any(first <= number < stop for first, stop in ranges):
                noise = torch.Generator().manual_seed(number)
                given.targets[row] = torch.randint(128, 256, given.targets[row].shape, generator=noise)
        return given

    monkeypatch.setattr(Loader, "batch", batch)
    return ranges


def curve(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(folder) if "loss" in row]


@pytest.fixture
def spiked(run: Callable, tmp_path: Path, kept: Path, poisoned: list) -> Path:
    """The folder of a run of which the poisoned samples were left out: a copy, for all tests but the first."""
    folder = tmp_path / "spiked"
    if (kept / "spiked").exists():
        return shutil.copytree(kept / "spiked", folder)
    assert run("spiked", *SPIKE)[0] == 0
    shutil.copytree(folder, kept / "spiked")
    return folder


def test_a_run_goes_on_as_if_it_had_never_read_what_made_the_spike(
    run: Callable, tmp_path: Path, spiked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = spiked
    (line,) = [line for line in (folder / "train.log").read_text().splitlines() if line.startswith("spike at step")]
    assert line.startswith("spike at step 14: loss ")
    assert line.endswith("(2 consecutive steps). Resuming from step-00000010 without samples 44 to 55")
    (row,) = [row for row in read_metrics(folder) if "spike_step" in row]
    assert {key: row[key] for key in ("step", "spike_step", "skipped_from", "skipped_to")} == {
        "step": 10, "spike_step": 14, "skipped_from": 44, "skipped_to": 56,
    }  # fmt: skip
    assert [step for step, _ in curve(folder)] == list(range(1, 17))
    replaced = (folder / "metrics.replaced.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in replaced] == [11, 12, 13]
    order = [json.loads(line) for line in (folder / "data_order.jsonl").read_text().splitlines()]
    order = [row for row in order if "spike_step" in row]
    assert order == [{"step": 10, "spike_step": 14, "skipped": list(SKIPPED)}]
    stored = meta(folder, 16)
    assert stored["skipped_samples"] == [list(SKIPPED)]
    assert (stored["consumed_samples"], stored["tokens"]) == (16 * 4 + 12, 16 * 4 * 32)

    known = BatchSchedule(4).skipping([SKIPPED])
    monkeypatch.setattr("gptlite.data.build.batch_schedule", lambda *_: known)
    assert run("known", *SPIKE, "trainer.spike.policy=none")[0] == 0
    assert differing(tmp_path / "known", folder, 16) == []
    assert curve(tmp_path / "known") == curve(folder)


class Killed(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the spike", "before the rewind is done", "after it"])
def test_a_kill_meanwhile_changes_nothing(
    run: Callable, tmp_path: Path, poisoned: list, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    assert run("whole", *SPIKE)[0] == 0
    with monkeypatch.context() as patch:
        from gptlite.trainer.report import Reporter

        def die(*_: object, **__: object) -> None:
            raise Killed

        if where == "in the spike":
            real = Reporter.step
            patch.setattr(
                Reporter, "step", lambda self, state, *a: die() if state.step == 13 else real(self, state, *a)
            )
        elif where == "before the rewind is done":
            patch.setattr("gptlite.trainer.state.load_tensors", die)
        else:
            patch.setattr(Reporter, "rewound", die)
        with pytest.raises(Killed):
            run("killed", *SPIKE)
    assert run("killed", *SPIKE)[0] == 0
    assert differing(tmp_path / "killed", tmp_path / "whole", 16) == []
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert (tmp_path / "killed" / "data_order.jsonl").read_text().count("spike_step") == 1


def test_checkpoints_from_within_the_spike_are_renamed(run: Callable, tmp_path: Path, spiked: Path) -> None:
    """With an interval of 4, step 12 is saved, which has read samples that are skipped with the spike of step 14."""
    assert run("a", *SPIKE, "checkpoint.interval=4")[0] == 0
    folders = sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir() if path.is_dir())
    assert folders[:2] == ["step-00000012", "step-00000016"]
    assert folders[2].startswith("superseded-step-00000012-")
    assert "Resuming from step-00000008" in (tmp_path / "a" / "train.log").read_text()
    assert differing(tmp_path / "a", spiked, 16) == [], "from another checkpoint, or not repeatable"


@pytest.mark.slow
def test_a_resumed_run_still_leaves_out_what_made_the_spike(run: Callable, spiked: Path) -> None:
    assert run("spiked", *SPIKE, "trainer.max_steps=17")[0] == 0
    stored = meta(spiked, 17)
    assert stored["skipped_samples"] == [list(SKIPPED)]
    assert stored["consumed_samples"] == 17 * 4 + 12


def test_a_gradient_that_is_not_finite_is_a_spike_at_once(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gptlite.models.gpt.model import GPT

    real = GPT.forward

    def forward(self: GPT, x: torch.Tensor, targets: torch.Tensor, sample_ids: torch.Tensor | None = None, **more):
        out = real(self, x, targets, sample_ids, **more)
        return out * math.inf if sample_ids is not None and (sample_ids == 14).any() else out

    monkeypatch.setattr(GPT, "forward", forward)
    options = [*SPIKE, "trainer.max_steps=6", "checkpoint.interval=2"]
    assert run("a", *options)[0] == 0
    log = (tmp_path / "a" / "train.log").read_text()
    assert "spike at step 4: loss inf, gradient norm nan. Resuming from step-00000002 without samples 8 to 15" in log
    assert run("b", *options, "trainer.spike.policy=none")[0] == 1
    assert json.loads((tmp_path / "b" / "result.json").read_text())["status"].startswith("diverged: step 4: loss inf")


def test_a_run_that_does_not_stop_spiking_ends_in_words(run: Callable, tmp_path: Path, poisoned: list, capsys) -> None:
    poisoned[:] = [(64, 10**9)]
    assert run("a", *SPIKE, "trainer.max_steps=24", "trainer.spike.max_rewinds=2")[0] == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "the run has already been rewound trainer.spike.max_rewinds=2 times" in line
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["status"].startswith("spiked: spike at step ")
    (left,) = (tmp_path / "a" / "checkpoints").glob("step-*")  # the margin of the second spike is in step 15
    assert left.name == "step-00000010"


def test_without_a_checkpoint_from_before_there_is_no_way_back(run: Callable, poisoned: list, capsys) -> None:
    assert run("a", *SPIKE, "checkpoint.interval=100")[0] == 1
    out = capsys.readouterr().err
    assert "there is no checkpoint from before its samples, 44 to 55; set a smaller checkpoint.interval" in out


def test_the_band_is_the_median_and_its_deviation() -> None:
    watch = SpikeWatch(SpikeConfig(policy="skip", window=9, threshold=4.0, rise=0.1, patience=2, margin=2))
    losses = [3.0, 3.1, 2.9, 3.0, 3.2, 2.8, 3.05, 2.95, 3.0]
    for number, loss in enumerate(losses):
        assert watch.limit() == math.inf
        assert watch.taken(number + 1, 10 * number, 10 * number + 10, loss) is None
    assert watch.limit() == pytest.approx(3.0 + 4 * 1.4826 * 0.05)
    assert watch.taken(10, 90, 100, 3.4) is None
    assert watch.suspects
    assert watch.taken(11, 100, 110, 3.2) is None  # it was none, and is part of the band from now on
    assert not watch.suspects
    assert [seen.loss for seen in watch.steps] == [2.9, 3.0, 3.2, 2.8, 3.05, 2.95, 3.0, 3.4, 3.2]
    assert watch.taken(12, 110, 120, 9.0) is None
    spike = watch.taken(13, 120, 130, 9.0)
    assert spike is not None
    assert (spike.step, spike.first, spike.stop) == (13, 90, 130)


def test_a_failed_step_is_left_out_even_if_no_other_is_known() -> None:
    for margin in (0, 1):
        watch = SpikeWatch(SpikeConfig(policy="skip", margin=margin))
        assert watch.failed(1, 40, 50, "its loss is NaN") == Spike(1, 40, 50, "its loss is NaN")
        assert watch.suspects


def test_a_quiet_loss_needs_the_rise() -> None:
    watch = SpikeWatch(SpikeConfig(policy="skip", window=8, rise=0.25, patience=1))
    for number in range(8):
        watch.taken(number + 1, number, number + 1, 2.0)
    assert watch.limit() == 2.25
    assert watch.taken(9, 8, 9, 2.25) is None
    assert watch.taken(10, 9, 10, 2.2500001) is not None


def test_what_a_checkpoint_remembers_decides_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = (2 + torch.rand(200, generator=generator).square() * 3).tolist()
    config = SpikeConfig(policy="skip", window=16, threshold=2.0, rise=0.0, patience=2)
    one, other, found = SpikeWatch(config), SpikeWatch(config), []
    for number, loss in enumerate(losses):
        fresh = SpikeWatch(config)
        fresh.load_meta(json.loads(json.dumps(other.meta())))
        other = fresh
        found.append(one.taken(number, number, number + 1, loss))
        assert other.taken(number, number, number + 1, loss) == found[-1]
    assert any(found)


REFUSED = {
    "trainer.spike.policy=skp": "trainer.spike.policy=skp is not none or skip; did you mean skip?",
    "trainer.spike.policy=skip checkpoint.keep=1": "trainer.spike.policy=skip with checkpoint.keep=1: the only",
    "trainer.spike.policy=skip checkpoint.interval=0": "rewinds to checkpoints, but checkpoint.interval=0 saves none",
    "trainer.spike.polcy=skip": "trainer.spike.polcy is not a key; did you mean trainer.spike.policy?",
    "+trainer.spike.wimdow=8": "trainer.spike.wimdow is not a key; did you mean trainer.spike.window?",
    "trainer.spike.patience=0": "trainer.spike.patience=0 must be at least 1",
    "trainer.spike.window=3": "trainer.spike.window=3 must be at least 8",
}


@pytest.mark.parametrize("given", REFUSED)
def test_settings_that_cannot_work_are_refused(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(given.split())
    assert REFUSED[given] in str(refused.value)
