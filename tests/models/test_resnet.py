"""A model and data that are not text: every layout trains as one process does, and resumes what another stopped."""

import pytest
from distributed.ranks import Ranks
from models.resnet import train
from run_files import read_metrics

GROUP, BATCH = "model.norm=group", "model.norm=batch"
# Samples of a micro-batch over all data ranks: batch norm's statistics depend on it, and on nothing else of a layout.
EIGHT = {1: "data.micro_batch_size=8", 2: "data.micro_batch_size=4"}
TWO = {
    "data2": (2, "parallelism.zero=0"),
    "zero1": (2, "parallelism.zero=1"),
    "zero2": (2, "parallelism.zero=2"),
    "zero3": (2, "parallelism.zero=3"),
    "zero3 recomputed": (2, "parallelism.zero=3", "parallelism.activation_checkpointing=full"),
    "zero3 selective": (2, "parallelism.zero=3", "parallelism.activation_checkpointing=selective"),
    "hsdp buckets of 2": (2, "parallelism.zero=2", "parallelism.bucket_layers=2"),
    "offload": (2, "parallelism.zero=2", "parallelism.offload=cpu"),
    "1f1b": (1, "parallelism.pipeline=2", "parallelism.schedule=1f1b"),
    "gpipe recomputed": (
        1,
        "parallelism.pipeline=2",
        "parallelism.schedule=gpipe",
        "parallelism.activation_checkpointing=full",
    ),
    "interleaved": (1, "parallelism.pipeline=2", "parallelism.schedule=interleaved_1f1b"),
    "zero bubble": (1, "parallelism.pipeline=2", "parallelism.schedule=zero_bubble"),
    "zbv": (1, "parallelism.pipeline=2", "parallelism.schedule=zbv"),
}


def curve(folder) -> list[float]:
    rows = read_metrics(folder)
    return [row[key] for row in rows for key in ("loss", "grad_norm", "val_loss", "val_accuracy") if key in row]


def correct(folder) -> list[int]:
    """Correct answers in each step's batch of 16."""
    counts = [16 * row["train_accuracy"] for row in read_metrics(folder) if "loss" in row]
    assert all(count == int(count) for count in counts)
    return [int(count) for count in counts]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Curves and correct answers of one process, by norm."""
    found = {}
    for norm in (GROUP, BATCH):
        folder = tmp_path_factory.mktemp("alone")
        assert train(str(folder), norm, EIGHT[1]) == 0
        found[norm] = curve(folder), correct(folder)
    return found


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("norm", [GROUP, BATCH])
@pytest.mark.parametrize("name", TWO)
def test_every_layout_has_the_curve_of_one_process(alone, two, tmp_path, name, norm):
    data, *layout = TWO[name]
    assert two.run("models.resnet:train", str(tmp_path), norm, EIGHT[data], *layout, timeout=120) == [0, 0]
    assert curve(tmp_path) == pytest.approx(alone[norm][0], rel=2e-4)
    assert correct(tmp_path) == alone[norm][1]


@pytest.mark.parametrize("name", ["zero3 recomputed", "1f1b"])
def test_one_process_goes_on_with_what_two_ranks_have_saved(alone, two, tmp_path, name):
    data, *layout = TWO[name]
    stopped = (BATCH, EIGHT[data], "trainer.stop_step=2", *layout)
    assert two.run("models.resnet:train", str(tmp_path), *stopped, timeout=120) == [0, 0]
    again = (BATCH, EIGHT[1], "parallelism=single", "trainer.stop_step=null")
    assert train(str(tmp_path), *again) == 0
    assert "by more if data.micro_batch_size x data-parallel ranks changes" in (tmp_path / "train.log").read_text()
    assert curve(tmp_path) == pytest.approx(alone[BATCH][0], rel=2e-4)
    assert correct(tmp_path) == alone[BATCH][1]
