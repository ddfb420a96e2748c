"""Metrics of training steps: in rows, lines and plots, with a lag too; a metric that is not recorded is named first."""

import re
import sys
from functools import partial

import pytest
import torch
from marking import marked
from models.resnet import config_of, train
from run_files import read_metrics
from torch import nn

from examples.resnet import ResNetConfig, ResNetSpec
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.models.metrics import Recording
from gptlite.models.model import Model
from gptlite.models.spec import ModelSpec
from gptlite.ops.inputs import Inputs
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import build_mesh
from gptlite.satellites.plots.curves import own_metrics, plot_curves
from gptlite.trainer.build import build_run
from gptlite.trainer.trainer import Trainer

LIKE = ("step", "loss", "grad_norm", "train_accuracy", "val_accuracy")


def test_rows_lines_and_plots_have_them(tmp_path):
    words = ("data.samples=64", "trainer.max_epochs=2", "optimizer.lr=3e-3", "data.micro_batch_size=8")
    assert train(str(tmp_path), *words, "checkpoint.interval=0") == 0
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    assert all(16 * row["train_accuracy"] == int(16 * row["train_accuracy"]) for row in rows)
    assert rows[-1]["train_accuracy"] > rows[0]["train_accuracy"]
    assert re.search(r"  loss +\S+  accuracy \d\.\d{4} +\d+ samples/s  ETA ", (tmp_path / "train.log").read_text())
    assert own_metrics(rows) == ["accuracy"]
    assert plot_curves(tmp_path / "metrics.jsonl", tmp_path / "again.png").stat().st_size > 10_000


@pytest.mark.parametrize("precision", marked(["bf16", "fp32"], quick=1, slow=1))
def test_a_lag_changes_nothing(tmp_path, monkeypatch, precision):
    found = []
    for lag in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["gptlite.pretrain"], "Trainer", partial(Trainer, lag=lag))
            assert train(str(tmp_path / str(lag)), f"precision={precision}", "checkpoint.interval=0") == 0
        found.append([[row.get(key) for key in LIKE] for row in read_metrics(tmp_path / str(lag))])
    assert found[0] == found[1]


def test_a_model_without_metrics_has_none(tmp_path):
    words = "model=gpt-lite model.num_layers=1 model.d_model=16 model.num_heads=2 data=synthetic data.num_tokens=500"
    words += f" data.sequence_length=16 data.vocab_size=64 run.name=none run.dir={tmp_path}"
    run = build_run(load(words.split()), build_mesh(ParallelismConfig()), lambda _: None)
    assert not isinstance(run.passes.forward, Recording)
    run = build_run(config_of(f"run.dir={tmp_path}"), build_mesh(ParallelismConfig()), lambda _: None)
    assert isinstance(run.passes.forward, Recording)


class Scores(ModelSpec):
    """A linear model whose loss records what `found` has."""

    name, schema, metrics = "scores", ResNetConfig, ("accuracy", "margin")
    found: object = None

    def build(self, config, ops, seed):
        return nn.Sequential(nn.Linear(4, 3))

    def loss(self, out, inputs):
        if inputs.metrics is not None:
            inputs.metrics.update(self.found)
        return out.sum()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"accuracy": 1}, "its loss does not record margin, declared in `metrics`, in inputs.metrics"),
        ({"accuracy": 1, "margin": 2.0, "top5": 3}, "its loss records top5; add top5 to the spec's `metrics`"),
        ({"accuracy": 1, "margin": torch.zeros(2)}, "the metric margin is a tensor of shape [2]; record a scalar"),
        ({"accuracy": 1, "margin": "high"}, "the metric margin is str; record a scalar"),
        ({"accuracy": 1, "margin": torch.zeros(())}, None),
    ],
)
def test_a_metric_that_is_not_recorded_is_named_before_training(found, said):
    spec = Scores()
    spec.found = found
    check = partial(Model(spec, ResNetConfig()).check_pass, torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    if said is None:
        check()
        return
    with pytest.raises(ConfigError, match=re.escape(f"the scores model: {said}")):
        check()


def test_a_metric_that_is_not_recorded_is_refused_before_the_run_folder_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(ResNetSpec, "metrics", ("accuracy", "top5"))
    with pytest.raises(ConfigError, match="the resnet18 model: its loss does not record top5"):
        train(str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_recomputed_block_that_records_counts_once():
    """The dict of a micro-batch is read when the forward pass returns; later writes have no effect."""
    spec, kept = Scores(), []

    def forward(part, x, inputs):
        inputs.metrics.update(accuracy=1, margin=0.5)
        kept.append(inputs.metrics)
        return x.sum()

    recording = Recording(spec, forward)
    for _ in range(3):
        recording(nn.Identity(), torch.ones(2, requires_grad=True), Inputs(torch.zeros(2)))
        kept[-1].update(accuracy=100)
    assert recording.take(torch.device("cpu")).tolist() == [3, 1.5]
    assert recording.take(torch.device("cpu")).tolist() == [0, 0]
