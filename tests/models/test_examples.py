"""The examples: every layout trains as one process does, and every precision near fp32, or is refused in one line."""

from functools import cache
from itertools import product
from pathlib import Path

import pytest
from distributed.cells.run import Ranks
from marking import marked
from models.example_runs import RUNS, config_of, correct, curve, train
from run_files import read_metrics

from gptlite.errors import ConfigError

# What is below `parallelism` on two ranks, but for the first two: of one process.
LAYOUTS = {
    "alone": "",
    "alone recomputed": "activation_checkpointing=full",
    "data2": "zero=0",
    "zero1": "zero=1",
    "zero2": "zero=2",
    "zero3": "zero=3",
    "recomputed": "zero=3 activation_checkpointing=full",
    "selective": "zero=3 activation_checkpointing=selective",
    "offloaded activations": "zero=3 activation_checkpointing=offload",
    "buckets of 2": "zero=2 bucket_layers=2",
    "offload": "zero=2 offload=cpu",
    "zero3 offload": "zero=3 offload=cpu",
    "1f1b": "pipeline=2 schedule=1f1b",
    "gpipe recomputed": "pipeline=2 schedule=gpipe activation_checkpointing=full",
    "interleaved": "pipeline=2 schedule=interleaved_1f1b",
    "zero bubble": "pipeline=2 schedule=zero_bubble",
    "zbv": "pipeline=2 schedule=zbv",
}
EXAMPLES = {**dict.fromkeys(RUNS, ()), "resnet group": ("model.norm=group",)}


def train_in(layout: str, name: str, folder: Path, two: Ranks | None, *overrides: str) -> None:
    """Trains an example. Micro-batches have 8 samples over all data ranks: batch norm's statistics depend on that."""
    example, words = name.partition(" ")[0], LAYOUTS[layout]
    given = [*(f"parallelism.{word}" for word in words.split()), *EXAMPLES[name], *overrides]
    one = layout.startswith("alone")
    micro = f"data.micro_batch_size={8 if one or 'pipeline' in words else 4}"
    if one:
        assert train(example, str(folder), micro, *given) == 0
    else:
        assert two is not None
        assert two.run("models.example_runs:train", example, str(folder), micro, *given, timeout=120) == [0, 0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folders of one process's runs in fp32, by example."""

    @cache
    def found(name: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        train_in("alone", name, folder, None)
        return folder

    return found


# Of the ResNet every layout that it can have, with both norms; those first in the list quickly, with one of them.
QUICK = ["1f1b", "interleaved", "zero bubble", "zero2", "zero3"]
RESNET = [
    *QUICK,
    *sorted(set(LAYOUTS) - {*QUICK, "alone", "alone recomputed", "offloaded activations", "zero3 offload"}),
]
GROUP = {"zero2", "zero3", "zero bubble"}  # those with group norm
NORMS = [("resnet group" if layout in GROUP else "resnet", layout) for layout in RESNET]
NORMS += [each for each in product(["resnet", "resnet group"], RESNET) if each not in NORMS]
PLACED = ["zero3", "zero1", "zero3 offload", "recomputed", "selective", "offloaded activations"]
OTHERS = [("mlp", "1f1b"), *((name, layout) for layout, name in product(PLACED, ["mlp", "hf", "t5"]))]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*marked(OTHERS, quick=3, slow=11), *marked(NORMS, quick=len(QUICK), slow=len(NORMS) - len(QUICK))],
)
def test_every_layout_has_the_curve_of_one_process(alone, two, tmp_path, name, layout):
    train_in(layout, name, tmp_path, two)
    resnet = name.startswith("resnet")
    assert curve(tmp_path) == pytest.approx(curve(alone(name)), rel=2e-4 if resnet else 2e-5)
    assert not resnet or correct(tmp_path) == correct(alone(name))


@pytest.mark.parametrize("layout", marked(["1f1b", "recomputed"], quick=1, slow=1))
def test_one_process_goes_on_with_what_two_ranks_have_saved(alone, two, tmp_path, layout):
    train_in(layout, "resnet", tmp_path, two, "trainer.stop_step=2")
    train_in("alone", "resnet", tmp_path, None, "parallelism=single", "trainer.stop_step=null")
    assert "by more if data.micro_batch_size x data-parallel ranks changes" in (tmp_path / "train.log").read_text()
    assert curve(tmp_path) == pytest.approx(curve(alone("resnet")), rel=2e-4)
    assert correct(tmp_path) == correct(alone("resnet"))


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_falls(alone, name):
    values = curve(alone(name))
    assert values[-2] < values[0] * 0.99


@pytest.mark.parametrize("name", ["hf", "t5"])
def test_a_pipeline_is_refused_where_blocks_are_not_in_a_sequence(name):
    with pytest.raises(ConfigError, match=r"pipeline=2: the \w+ model does not declare its number of blocks"):
        config_of(name, "parallelism.pipeline=2", "data.micro_batch_size=8")


# Bound on the relative difference of each loss from fp32's: 8 and 11 bits of significand, through four updates.
PRECISIONS = {"bf16": 0.05, "fp16": 0.02, "amp_o1": 0.02, "bf16_stochastic": 0.05}
SOME = [("resnet", "bf16_stochastic", "alone"), ("resnet", "fp16", "1f1b")]
SOME += product(EXAMPLES, PRECISIONS, ["zero3"])
SOME += product(["resnet"], PRECISIONS, ["alone", "alone recomputed", "offload", "1f1b"])


@pytest.mark.parametrize(("name", "precision", "layout"), marked(list(dict.fromkeys(SOME)), slow=10))
def test_16_bit_losses_are_near_those_of_fp32(alone, two, tmp_path, name, precision, layout):
    half = precision in ("fp16", "amp_o1")
    scale = ["precision.initial_scale_power=8"] if half else []  # so that no step overflows and is skipped
    train_in(layout, name, tmp_path, two, f"precision={precision}", *scale)
    assert losses(tmp_path) == pytest.approx(losses(alone(name)), rel=PRECISIONS[precision])


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.mark.parametrize("name", RUNS)
def test_fp8_is_refused(name):
    with pytest.raises(
        ConfigError, match=r"precision=fp8: the \w+ model has no GEMMs that run in fp8; use precision=bf16"
    ):
        config_of(name, "precision=fp8")
