"""The examples: every layout trains as one process does, and every precision near fp32, or is refused in one line."""

from itertools import product

import pytest
from distributed.ranks import Ranks
from models.example_runs import RUNS, config_of, train
from models.test_resnet import curve

from gptlite.errors import ConfigError

TWO = ("parallelism.data=2", "data.micro_batch_size=4")
LAYOUTS = {
    "zero3": TWO,
    "zero1": (*TWO, "parallelism.zero=1"),
    "offload": (*TWO, "parallelism.offload=cpu"),
    "recomputed": (*TWO, "parallelism.activation_checkpointing=full"),
    "selective": (*TWO, "parallelism.activation_checkpointing=selective"),
    "offloaded activations": (*TWO, "parallelism.activation_checkpointing=offload"),
}
PIPELINE = ("parallelism.pipeline=2", "data.micro_batch_size=8")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Curves of one process in fp32, by example."""
    folders = {name: tmp_path_factory.mktemp(name) for name in RUNS}
    for name, folder in folders.items():
        assert train(name, str(folder), "data.micro_batch_size=8") == 0
    return {name: curve(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize(("name", "layout"), [*product(["mlp", "hf", "t5"], LAYOUTS), ("mlp", "1f1b")])
def test_every_layout_has_the_curve_of_one_process(alone, two, tmp_path, name, layout):
    overrides = ["parallelism=zero3", *LAYOUTS[layout]] if layout in LAYOUTS else PIPELINE
    assert two.run("models.example_runs:train", name, str(tmp_path), *overrides, timeout=120) == [0, 0]
    assert curve(tmp_path) == pytest.approx(alone[name], rel=2e-5)


def test_the_loss_falls(alone):
    for name, values in alone.items():
        assert values[-2] < values[0] * 0.99, name


@pytest.mark.parametrize("name", ["hf", "t5"])
def test_a_pipeline_is_refused_where_blocks_are_not_in_a_sequence(name):
    with pytest.raises(ConfigError, match=r"pipeline=2: the \w+ model does not declare its number of blocks"):
        config_of(name, *PIPELINE)
