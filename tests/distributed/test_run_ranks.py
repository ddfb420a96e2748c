"""A run on several ranks: rank 0 tells and writes, and resuming on the same layout changes no bit."""

import json

import pytest
from run_files import checkpoint, differing, read_metrics

LAYOUT = ["parallelism.pipeline=2", "parallelism.zero=3", "data.micro_batch_size=1", "checkpoint.interval=0"]


def train(four, overrides):
    assert four.run("distributed.cells.steps:train", overrides, timeout=120) == [0] * 4


@pytest.mark.slow
def test_resuming_on_the_same_layout_is_bit_exact(four, tiny, tmp_path):
    run = [*tiny, *LAYOUT, "trainer.max_steps=4"]
    train(four, [*run, f"run.dir={tmp_path / 'whole'}"])
    train(four, [*run, f"run.dir={tmp_path / 'cut'}", "trainer.max_steps=2"])
    train(four, [*run, f"run.dir={tmp_path / 'cut'}"])
    assert differing(tmp_path / "whole", tmp_path / "cut", 4) == []
    log = (tmp_path / "cut" / "train.log").read_text()
    assert "resuming with a change" not in log
    assert log.count("step 3/4") == 1  # one rank's lines only

    log = " ".join((tmp_path / "whole" / "train.log").read_text().split())
    layout = "layout 4 ranks on CPU (gloo): pipeline 2 x data 2 (zero 3), 1f1b over 2 micro-batches"
    assert f"{layout} (pipeline bubble: 33% of a step); layers 0 | 1;" in log
    size = sum(
        tensor.numel() for key, tensor in checkpoint(tmp_path / "whole", 4)[0].items() if key.startswith("model.")
    )
    assert f"{size / 1000:.1f}k parameters" in log
    assert "== sample ==" in log
    assert [row["step"] for row in read_metrics(tmp_path / "whole") if "loss" in row] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["status"] == "done"

    train(four, [*run, "trainer.max_steps=6", f"run.dir={tmp_path / 'cut'}", "parallelism.zero=1"])
    log = (tmp_path / "cut" / "train.log").read_text()
    words = "layout: pipeline 2 x data 2 (zero 3), 1f1b then, pipeline 2 x data 2 (zero 1), 1f1b now"
    assert f"resuming with a change: {words}; losses may differ from those of an uninterrupted run by rounding" in log
