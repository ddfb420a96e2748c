"""The examples: every layout trains as one process does, and every precision near fp32, or is refused in one line."""

from functools import cache
from itertools import product

import pytest
from distributed.ranks import Ranks
from marking import marked
from models.example_runs import RUNS, config_of, train
from models.test_resnet import curve
from run_files import read_metrics

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


PLACED = [(name, layout) for layout, name in product(LAYOUTS, ["mlp", "hf", "t5"])]


@pytest.mark.parametrize(("name", "layout"), marked([("mlp", "1f1b"), *PLACED], quick=4, slow=10))
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


# Bound on the relative difference of each loss from fp32's: 8 and 11 bits of significand, through four updates.
PRECISIONS = {"bf16": 0.05, "fp16": 0.02, "amp_o1": 0.02, "bf16_stochastic": 0.05}
EXAMPLES = {**dict.fromkeys(RUNS, ()), "resnet group": ("model.norm=group",)}
PLACES = {
    "alone": ("data.micro_batch_size=8",),
    "recomputed": ("data.micro_batch_size=8", "parallelism.activation_checkpointing=full"),
    "zero3": ("parallelism=zero3", *TWO),
    "zero2 offload": ("parallelism=zero2", "parallelism.offload=cpu", *TWO),
    "1f1b": PIPELINE,
}
SOME = [("resnet", "bf16_stochastic", "alone"), ("resnet", "fp16", "1f1b")]
SOME += [(name, precision, "zero3") for name in EXAMPLES for precision in PRECISIONS]
SOME += [("resnet", precision, place) for precision in PRECISIONS for place in PLACES if place != "zero3"]


@pytest.mark.parametrize(("name", "precision", "place"), marked(list(dict.fromkeys(SOME)), quick=1, slow=9))
def test_16_bit_losses_are_near_those_of_fp32(near, two, tmp_path, name, precision, place):
    overrides = (*EXAMPLES[name], *PLACES[place], f"precision={precision}")
    if precision in ("fp16", "amp_o1"):
        overrides += ("precision.initial_scale_power=8",)  # so that no step overflows and is skipped
    example = name.partition(" ")[0]
    if "data=2" in " ".join(overrides) or place == "1f1b":
        assert two.run("models.example_runs:train", example, str(tmp_path), *overrides, timeout=120) == [0, 0]
    else:
        assert train(example, str(tmp_path), *overrides) == 0
    assert losses(tmp_path) == pytest.approx(near(name), rel=PRECISIONS[precision])


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """Losses of one process in fp32, by example."""

    @cache
    def found(name: str) -> list[float]:
        folder = tmp_path_factory.mktemp("near")
        assert train(name.partition(" ")[0], str(folder), "data.micro_batch_size=8", *EXAMPLES[name]) == 0
        return losses(folder)

    return found


def losses(folder) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.mark.parametrize("name", RUNS)
def test_fp8_is_refused(name):
    with pytest.raises(
        ConfigError, match=r"precision=fp8: the \w+ model has no GEMMs that run in fp8; use precision=bf16"
    ):
        config_of(name, "precision=fp8")
