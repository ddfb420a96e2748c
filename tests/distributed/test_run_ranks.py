"""A run on several ranks: rank 0 tells and writes, and resuming on the same layout changes no bit."""

import json

import pytest
import torch

from distributed.ranks import Ranks
from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import read_manifest

LAYOUT = ["parallelism.pipeline=2", "parallelism.zero=3", "data.micro_batch_size=1", "checkpoint.interval=0"]


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


def stored(folder):
    """Every tensor of a checkpoint, whole."""
    entries = read_manifest(folder).tensors
    tensors = {key: torch.zeros(e["shape"], dtype=getattr(torch, e["dtype"])) for key, e in entries.items()}
    load_tensors(folder, tensors)
    return tensors


def train(four, overrides):
    assert four.run("distributed.run_cases:train", overrides, timeout=120) == [0] * 4


@pytest.mark.slow
def test_resuming_on_the_same_layout_is_bit_exact(four, tiny, tmp_path):
    run = [*tiny, *LAYOUT, "trainer.max_steps=4"]
    train(four, [*run, f"run.dir={tmp_path / 'whole'}"])
    train(four, [*run, f"run.dir={tmp_path / 'cut'}", "trainer.max_steps=2"])
    train(four, [*run, f"run.dir={tmp_path / 'cut'}"])
    whole, cut = (stored(tmp_path / name / "checkpoints" / "step-00000004") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert [key for key in whole if not torch.equal(whole[key], cut[key])] == []
    log = (tmp_path / "cut" / "train.log").read_text()
    assert "resuming elsewhere" not in log
    assert log.count("step 3/4") == 1  # one rank's lines only

    log = " ".join((tmp_path / "whole" / "train.log").read_text().split())
    assert "layout 4 ranks on CPU (gloo): pipeline 2 x data 2 (zero 3), 1f1b over 2 micro-batches; layers 0 | 1;" in log
    size = sum(tensor.numel() for key, tensor in whole.items() if key.startswith("model."))
    assert f"{size / 1000:.1f}k parameters" in log
    assert "== sample ==" in log
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["status"] == "done"

    train(four, [*run, "trainer.max_steps=6", f"run.dir={tmp_path / 'cut'}", "parallelism.zero=1"])
    log = (tmp_path / "cut" / "train.log").read_text()
    words = "layout: pipeline 2 x data 2 (zero 3), 1f1b then, pipeline 2 x data 2 (zero 1), 1f1b now"
    assert f"resuming elsewhere: {words}; the curve may differ from an uninterrupted run's by rounding" in log


@pytest.mark.slow
def test_what_rank_0_refuses_all_refuse_and_nothing_is_written(four, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    refused = four.run("distributed.run_cases:refusal", [*tiny, *LAYOUT, f"run.dir={tmp_path / 'file'}"])
    assert len(set(refused)) == 1
    assert refused[0].startswith("run.dir=")
    refused = four.run("distributed.run_cases:refusal", [*tiny, *LAYOUT, f"run.dir={tmp_path / 'a'}", "data.path=none"])
    assert len(set(refused)) == 1
    assert refused[0].startswith("data.path=none")
    assert not (tmp_path / "a").exists()
