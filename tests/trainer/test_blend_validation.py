"""The held-out text of a blend: a row has each folder's loss and the joint one, always of the same samples."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import read_metrics
from token_folders import documents, write_folder

from gptlite.data.indexed import IndexedDataset
from gptlite.ops.inputs import Inputs
from gptlite.trainer.restore import restore

LENGTH, LIMIT, END = 32, 4, 256
Row = dict[str, float]


@pytest.fixture
def folders(tiny: list[str], tmp_path: Path) -> list[Path]:
    """What the tiny run reads: one folder with less held-out text than is evaluated, and one with more."""
    web = write_folder(tmp_path / "web", train=documents(1, 40), val=["a cat sat on weiß", "", "a dog ran on"] * 2)
    code = write_folder(tmp_path / "code", train=documents(2, 40), val=documents(3, 12))
    own = ("data=", "data.path", "data.tokenizer", "data.cache_dir", "trainer.eval_samples", "trainer.sample_tokens")
    tiny[:] = [each for each in tiny if not each.startswith(own)]
    tiny += ["data=tokens", f"data.blend={{{web}: 0.7, {code}: 0.3}}", f"trainer.eval_samples={LIMIT}"]
    tiny += ["trainer.sample_tokens=0", "trainer.eval_interval=2"]
    return [web, code]


def evaluations(folder: Path) -> list[Row]:
    rows = [row for row in read_metrics(folder) if "val_loss" in row]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def measured(run_dir: Path, folder: Path) -> tuple[float, int, int]:
    """Nats, tokens and bytes of LIMIT evenly spread stretches of held-out text, each read by itself."""
    model, runner, *_ = restore(str(run_dir), "fp32")
    tokens = IndexedDataset(folder / "val").tokens.astype(np.int64)
    chunks = [tokens[start : start + LENGTH + 1] for start in range(0, len(tokens) - 1, LENGTH)]
    count = min(LIMIT, len(chunks))
    nats, counted, text_bytes = 0.0, 0, 0
    for index in range(count):
        chunk = torch.from_numpy(chunks[index * len(chunks) // count])
        with torch.no_grad():
            nats += model.forward(runner.parts[0], chunk[None, :-1], Inputs(chunk[None, 1:])).item()
        counted += len(chunk) - 1
        text_bytes += int((chunk[1:] != END).sum())  # an end of document costs bits and stands for no byte
    return nats, counted, text_bytes


def test_each_folder_has_its_row_and_the_joint_one_weighs_them_by_tokens(
    run: Callable, folders: list[Path], tmp_path: Path
):
    assert run("a", "trainer.max_steps=2")[0] == 0
    (row,) = evaluations(tmp_path / "a")
    parts = {folder: measured(tmp_path / "a", folder) for folder in folders}
    tokens = [counted for _, counted, _ in parts.values()]
    assert tokens[0] % LENGTH  # a short last stretch
    assert tokens[0] < LIMIT * LENGTH == tokens[1]
    for folder, (nats, counted, text_bytes) in parts.items():
        assert text_bytes < counted
        assert row[f"val_loss/{folder}"] == pytest.approx(nats / counted, rel=1e-5)
        assert row[f"val_bits_per_byte/{folder}"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)
    nats, counted, text_bytes = (sum(each) for each in zip(*parts.values(), strict=True))
    assert row["val_loss"] == pytest.approx(nats / counted, rel=1e-5)
    assert row["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)
    weighted = sum(count * row[f"val_loss/{folder}"] for count, folder in zip(tokens, folders, strict=True))
    assert row["val_loss"] == pytest.approx(weighted / sum(tokens), rel=1e-9)
    assert row["val_loss"] != pytest.approx(sum(row[f"val_loss/{folder}"] for folder in folders) / 2, rel=1e-5)


def test_the_samples_are_the_same_whatever_the_length_of_the_run(run: Callable, folders: list[Path], tmp_path: Path):
    """So that the curves of a short and a long run compare."""
    for steps in (2, 6):
        assert run(f"of-{steps}", f"trainer.max_steps={steps}")[0] == 0
    short, long = evaluations(tmp_path / "of-2"), evaluations(tmp_path / "of-6")
    assert [row["step"] for row in long] == [2, 4, 6]
    assert long[0] == short[0]
    losses = [row[f"val_loss/{folder}"] for row in long for folder in folders]
    assert len(set(losses)) == len(losses)
    last = {folder: measured(tmp_path / "of-6", folder) for folder in folders}
    for folder, (nats, counted, _) in last.items():
        assert long[-1][f"val_loss/{folder}"] == pytest.approx(nats / counted, rel=1e-5)
