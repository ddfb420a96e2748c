"""Length in epochs: `trainer.max_epochs` becomes a number of steps, on any layout, and a wrong value is one line."""

import re

import pytest
from distributed.cells.run import Ranks
from models.resnet import config_of, train
from run_files import read_metrics

from gptlite.config import load
from gptlite.config.completed import with_epochs
from gptlite.config.saved import read_saved
from gptlite.data.batches import BatchSchedule
from gptlite.data.build import open_data
from gptlite.errors import ConfigError
from gptlite.parallelism.rank_sync import ALONE

SYNTHETIC = "data=synthetic data.sequence_length=16 data.num_tokens=1600 data.global_batch_size=8 run.name=epochs"


@pytest.mark.parametrize(
    ("size", "ramp", "samples", "steps"),
    [(16, None, 96, 6), (16, None, 97, 7), (16, None, 1, 1), (8, (2, 2, 12), 22, 5), (8, (2, 2, 12), 23, 6)],
)
def test_batches_that_read_that_many_samples(size, ramp, samples, steps):
    schedule = BatchSchedule(size, ramp)
    assert schedule.batches(samples) == steps
    assert schedule.after(0, steps) >= samples > schedule.after(0, steps - 1)


@pytest.mark.parametrize(("epochs", "steps"), [("1", 6), ("1.5", 9), ("0.1", 1), ("3", 17)])
def test_the_last_batch_is_completed(epochs, steps):
    assert with_epochs(config_of(f"trainer.max_epochs={epochs}"), 90).trainer.max_steps == steps


def test_an_epoch_of_tokens_is_in_sequences():
    config = load([*SYNTHETIC.split(), "trainer.max_epochs=2", "schedule.warmup_steps=0"])
    data = open_data(config.data, config.seed, print, ALONE)
    assert data.num_samples(16) == 99  # the last of 1600 tokens is a target alone
    assert with_epochs(config, data.num_samples(16)).trainer.max_steps == 25


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trainer.max_epochs=0", "trainer.max_epochs=0.0 must be above 0"),
        ("trainer.max_epochs=nan", "trainer.max_epochs=nan is not a number; give one"),
        ("trainer.max_epochs=two", "trainer.max_epochs: two is not a number"),
        (
            "trainer.max_epochs=2 trainer.max_steps=4",
            "trainer.max_steps=4 and trainer.max_epochs=2 both set the length of the run; leave one out",
        ),
    ],
)
def test_wrong_lengths_are_one_line(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        config_of(*words.split())


def test_the_schedule_is_checked_against_the_steps_of_the_epochs():
    config = config_of("trainer.max_epochs=2", "schedule.warmup_steps=12")
    with pytest.raises(ConfigError, match=re.escape("schedule.warmup_steps=12 does not end before trainer.max_steps=")):
        with_epochs(config, 90)
    assert with_epochs(config, 200).trainer.max_steps == 25


@pytest.mark.slow
def test_a_run_of_epochs_goes_on_with_another_data_degree(tmp_path, capsys):
    words = ("data.samples=40", "trainer.eval_interval=0", "checkpoint.interval=0", "schedule=cosine")
    given = (*words, "trainer.max_epochs=2")  # 80 samples in 5 steps
    assert train(str(tmp_path), *given, "trainer.stop_step=2", "data.micro_batch_size=8") == 0
    with Ranks(2) as ranks:
        more = ("data.micro_batch_size=4", "parallelism.zero=2", "trainer.stop_step=null")
        assert ranks.run("models.resnet:train", str(tmp_path), *given, *more, timeout=120) == [0, 0]
    log = (tmp_path / "train.log").read_text()
    assert "5 steps = 80 samples" in log
    assert ", 2 epochs, " in log
    assert "  epoch 2.00  loss" in log
    assert "trainer.max_epochs=4" in log  # the command that trains further
    assert read_saved(tmp_path / "config.yaml").trainer.max_steps == 5
    assert [row["epoch"] for row in read_metrics(tmp_path) if "loss" in row] == [0.4, 0.8, 1.2, 1.6, 2.0]
    capsys.readouterr()
    assert train(str(tmp_path), *given, "parallelism=single", "trainer.stop_step=null") == 0
    assert "already complete: step 5 of 5; to train further give trainer.max_epochs=4" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=re.escape("trainer.max_epochs=1 (3 steps) is below step 5 of")):
        train(str(tmp_path), *words, "trainer.max_epochs=1", "parallelism=single", "trainer.stop_step=null")


def test_one_length_replaces_the_other_at_a_resume(tmp_path):
    assert train(str(tmp_path), "trainer.max_epochs=0.5") == 0
    longer = load([f"run.dir={tmp_path}", "trainer.max_steps=5"])
    assert (longer.trainer.max_steps, longer.trainer.max_epochs) == (5, None)
    assert load([f"run.dir={tmp_path}", "trainer.max_epochs=2"]).trainer.max_epochs == 2
