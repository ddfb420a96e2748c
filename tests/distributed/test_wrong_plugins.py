"""Plugins that are wrong, on two ranks: one line on standard error, and no process is left."""

import shutil
from pathlib import Path

import forked
import pytest

from distributed.cells.commands import HERE, TRAIN, Start
from distributed.cells.run import Ranks

RUN = "plugins=[wrong_plugin] model=wrong data=rows data.global_batch_size=8 data.micro_batch_size=2 precision=fp32"
RUN += " run.dir=run run.name=x trainer.max_steps=4 parallelism.data=2"
PIPELINE = "parallelism.data=1 parallelism.pipeline=2"
GIVEN = "error: the wrong model, given float32 [1, 8] and targets int64 [1]: "
LOGITS = "TypeError: WrongSpec.loss: cross entropy needs logits [..., classes] and int64 targets [...], not output "
WRONG = [
    ("plugins=[broken]", 2, "error: plugins=[broken]: importing it raised ZeroDivisionError: division by zero"),
    ("model.fault=build", 2, "error: the wrong model cannot be built: KeyError: 'no such layer' (wrong_plugin.py:"),
    ("model.fault=width", 2, f"{GIVEN}RuntimeError: a and b must have same reduction dim"),
    ("model.fault=image", 2, f"{GIVEN}{LOGITS}(1, 2, 4)"),
    ("model.fault=pair", 2, f"{GIVEN}{LOGITS}tuple"),
    (
        f"model.fault=shape {PIPELINE}",
        2,
        "error: pipeline stage 0 returned a tensor of shape [2, 8], but the model's spec declares [2, 9]; correct",
    ),
    ("data.fault=empty", 2, "error: data=rows: the training dataset has length 0; it needs at least one sample"),
    ("data.fault=text", 2, "error: data=rows: a sample contains str 'a row'; return tensors or numbers"),
    ("data.fault=raises data.workers=2", 2, "raised OSError: the disk is gone"),
    ("data.fault=rank1", 2, "raised OSError: the disk is gone"),
    ("data.fault=rank1 data.workers=2", 2, "raised OSError: the disk is gone"),
    ("model.fault=mute", 2, "error: the wrong model cannot be built: Mute: (its message cannot be printed: KeyError)"),
    ("data.fault=mute", 2, "raised Mute: (its message cannot be printed: KeyError)"),
    ("data.fault=mute1", 2, "raised Mute: (its message cannot be printed: KeyError)"),
    ("data.fault=mute1 data.workers=2", 2, "raised Mute: (its message cannot be printed: KeyError)"),
    ("data.fault=collate", 2, "error: data=rows: samples cannot be collated (IndexError: two are too many)"),
    ("data.fault=nan", 1, "error: step 1: loss nan, gradient norm nan."),
]


# The one in a worker process of the data loader, with every test run.
QUICK = {"data.fault=rank1 data.workers=2"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [each if each[0] in QUICK else pytest.param(*each, marks=pytest.mark.slow) for each in WRONG],
)
def test_wrong_plugins_end_in_one_line(start: Start, tmp_path: Path, words: str, code: int, said: str) -> None:
    shutil.copy(HERE / "wrong_plugin.py", tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    command = [TRAIN, *RUN.split(), *words.split()]
    if Ranks.fork:  # where processes that are left are not found
        done = forked.run(*command, folder=tmp_path)
        ended, errors = done.returncode, done.stderr
    else:
        ended, _, errors = start(*command).end(timeout=400)
    assert (ended, errors.count("\n")) == (code, 1)
    assert said in errors


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run(start: Start, tmp_path: Path) -> None:
    shutil.copy(HERE / "wrong_plugin.py", tmp_path)
    ended, _, errors = start(TRAIN, *RUN.split(), "data.fault=exits", "data.workers=2").end(timeout=400)
    assert ended == 1
    assert "failed: RuntimeError: DataLoader worker" in errors.splitlines()[0]
