"""Wrong plugins on two ranks: one line on standard error, exit code 2 or 1, and no process left."""

from pathlib import Path

import pytest

from distributed.launch_command import TRAIN, Start

PLUGIN = """
from dataclasses import dataclass

from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec


@dataclass
class WrongConfig(ModelConfig):
    name: str = "wrong"
    peak_lr: float = 1e-3
    fault: str = ""


class WrongSpec(ModelSpec):
    name, schema, reads = "wrong", WrongConfig, "samples"

    def build(self, config, ops, seed):
        from torch import nn

        width = 5 if config.fault == "block" else 4
        return nn.Sequential(nn.Linear(4, width), nn.Linear(4, 4), nn.Linear(4, 3))


@dataclass
class PointsConfig(DatasetConfig):
    global_batch_size: int = 4
    fault: str = ""


class Points:
    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 0 if self.fault == "empty" else 16

    def __getitem__(self, index):
        import torch

        if self.fault == "raises" and index == 3:
            raise KeyError("no such file")
        if self.fault == "text":
            return "a cat", 0
        return torch.full((4,), float(index)), 0.5 if self.fault == "targets" else index % 3


register_model(WrongSpec())
register_data("points", PointsConfig, lambda config: (Points(config.fault), Points("")))
"""
RUN = "plugins=[wrong] model=wrong data=points run.dir=run precision=fp32 trainer.max_steps=8".split()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("data.fault=raises data.workers=1", 2, "data=points: sample 3 raises KeyError: 'no such file'"),
        pytest.param("data.fault=text", 2, "a sample holds str 'a cat'", marks=pytest.mark.slow),
        pytest.param("data.fault=empty", 2, "the training dataset has length 0", marks=pytest.mark.slow),
        pytest.param("data.fault=targets", 2, "give the spec a `loss`", marks=pytest.mark.slow),
        pytest.param("model.fault=block", 2, "the wrong model, given float32", marks=pytest.mark.slow),
        pytest.param(
            "model.fault=block parallelism.data=1 parallelism.pipeline=2", 2, "the wrong model", marks=pytest.mark.slow
        ),
    ],
)
def test_a_wrong_plugin_is_one_line(start: Start, tmp_path: Path, words: str, code: int, said: str) -> None:
    (tmp_path / "wrong.py").write_text(PLUGIN)
    found, _, errors = start(TRAIN, *RUN, "parallelism.data=2", *words.split()).end(250)
    assert found == code, errors
    assert said in errors
    assert errors.count("\n") == 1, errors
