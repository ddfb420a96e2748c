"""Stages on checkpoints: each element once, nothing missing, and comparisons to the bit."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.destruction.lives import TINY

from gptlite.checkpoint.store import step_folders
from gptlite.config import Config, load
from gptlite.precision import Precision
from gptlite.satellites.certify.owned import check_state, names_of
from gptlite.satellites.certify.resume import _elsewhere, differing, farthest
from gptlite.satellites.certify.tasks import train

STEPS = 2


@pytest.fixture(scope="module")
def config() -> Config:
    return load([*TINY, "ops=reference", f"trainer.max_steps={STEPS}", "checkpoint.interval=1", "checkpoint.keep=0"])


@pytest.fixture(scope="module")
def runs(config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a run, of the same run again, and of one with another seed."""
    folder = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    seeds = {"run": 1, "again": 1, "other": 2}
    for name, seed in seeds.items():
        assert train(replace(config, seed=seed), str(folder / name)) == 0
    return {name: folder / name for name in seeds}


def last(run: Path) -> Path:
    return step_folders(run / "checkpoints")[0]


def test_a_whole_checkpoint_has_all_once(config: Config, runs: dict[str, Path]):
    row = check_state(config, last(runs["run"]), last(runs["again"]))
    names = names_of(config)
    assert row.passed
    tensors = len(names) + sum(3 for parameter in names.values() if parameter)  # AdamW: two moments and a step
    assert (
        row.words == f"{tensors} tensors in {tensors} boxes of 1 ranks, each element once, none missing; sampler at 8"
    )


def test_what_is_missing_is_named(config: Config, runs: dict[str, Path]):
    deeper = replace(config, model=replace(config.model, num_layers=3))
    row = check_state(deeper, last(runs["run"]), last(runs["again"]))
    assert not row.passed
    assert row.words.startswith("model.layers.2.")
    assert " is missing, and " in row.words
    earlier = step_folders(runs["run"] / "checkpoints")[1]
    row = check_state(config, earlier, last(runs["again"]))
    assert row.words.startswith("step is 1, and 2 in a run of one process")
    half = replace(config, precision=replace(config.precision, dtype=Precision.fp16))
    assert check_state(half, last(runs["run"]), last(runs["again"])).words == "the loss scale is missing"


def test_a_damaged_checkpoint_fails(config: Config, runs: dict[str, Path], tmp_path: Path):
    copy = Path(shutil.copytree(last(runs["run"]), tmp_path / last(runs["run"]).name))
    (data,) = (copy / "data").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    row = check_state(config, copy, last(runs["again"]))
    assert not row.passed
    assert "bytes, but its manifest lists" in row.words
    assert check_state(config, None, None).passed is None


def test_checkpoints_are_compared_to_the_bit(runs: dict[str, Path]):
    assert differing(last(runs["run"]), last(runs["again"])) == ""
    assert " tensors differ from those of a run that nothing stopped: " in differing(
        last(runs["other"]), last(runs["run"])
    )
    assert farthest(last(runs["run"]), last(runs["again"]))[1] == 0
    assert farthest(last(runs["run"]), last(runs["other"]))[1] > 0.01


def test_a_run_elsewhere_is_held_against_the_limits_of_parity(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gptlite.satellites.certify.resume.STEPS", STEPS)
    assert _elsewhere(Precision.fp32, runs["again"], runs["run"]) == ("", 0.0)
    problem, _ = _elsewhere(Precision.fp32, runs["other"], runs["run"])
    assert problem.startswith("step 1: loss is off by ")
    text = (runs["again"] / "metrics.jsonl").read_text().splitlines()
    (runs["again"] / "metrics.jsonl").write_text("\n".join(text[1:]) + "\n")  # without step 1
    assert _elsewhere(Precision.fp32, runs["again"], runs["run"])[0] == "step 1: loss is off by nan (limit 1.0e-05)"
