"""`data=huggingface`: datasets on disk and local files, their columns, and what is wrong with them in one line."""

import json
import re

import models.resnet  # noqa: F401  # registers the model
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image

from gptlite.config import load
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.errors import ConfigError
from gptlite.satellites.images.config import HuggingFaceConfig
from gptlite.satellites.samples.dataset import SampleSets, open_samples

COLUMNS = {"x": [[float(n), 1.0] for n in range(40)], "label": [n % 3 for n in range(40)]}


def opened(tmp_path, path, **settings) -> SampleSets:
    config = HuggingFaceConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **settings)
    return open_samples(config)


def write_files(folder, kind: str) -> None:
    folder.mkdir()
    for part, count in (("train", 30), ("validation", 10)):
        rows = [{"x": float(n), "y": n, "label": "odd" if n % 2 else "even"} for n in range(count)]
        data, file = Dataset.from_list(rows), str(folder / f"{part}-00000-of-00001.{kind}")
        {"parquet": data.to_parquet, "csv": data.to_csv, "jsonl": data.to_json}[kind](file)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_files_by_part_and_columns_by_name(tmp_path, kind):
    write_files(tmp_path / "files", kind)
    sets = opened(tmp_path, tmp_path / "files")
    assert (len(sets.train), len(sets.validation["huggingface"])) == (30, 10)
    x, label = sets.train[3]  # a text label is the number of its class, in alphabetical order
    assert {name: float(value) for name, value in x.items()} == {"x": 3, "y": 3}
    assert (int(label), label.dtype, x["x"].dtype) == (1, torch.int64, torch.float32)
    x, label = opened(tmp_path, tmp_path / "files", input="x", label="y").train[4]
    assert (float(x), int(label)) == (4, 4)


def test_a_saved_dataset_is_divided_by_hash(tmp_path):
    Dataset.from_dict(COLUMNS).save_to_disk(tmp_path / "saved")
    sets = opened(tmp_path, tmp_path / "saved", validation_fraction=0.25)
    assert len(sets.train) + len(sets.validation["huggingface"]) == 40
    x, label = sets.train[0]
    assert int(x[0]) % 3 == int(label)
    again = opened(tmp_path, tmp_path / "saved", validation_fraction=0.25)
    assert again.identity == sets.identity
    assert opened(tmp_path, tmp_path / "saved", validation_fraction=0.25, label="label").identity == sets.identity


def test_splits_of_a_saved_dataset(tmp_path):
    parts = {"train": Dataset.from_dict(COLUMNS), "test": Dataset.from_dict(COLUMNS).select(range(5))}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    sets = opened(tmp_path, tmp_path / "saved")
    assert (len(sets.train), len(sets.validation["huggingface"])) == (40, 5)
    DatasetDict({"test": parts["test"]}).save_to_disk(tmp_path / "other")
    with pytest.raises(ConfigError, match="has the splits test, but no split train"):
        opened(tmp_path, tmp_path / "other")


def test_columns_of_images(tmp_path):
    images = [Image.fromarray(np.full((10 + n, 12, 3), 51, dtype=np.uint8)) for n in range(30)]
    Dataset.from_dict({"image": images, "label": [0] * 30}).save_to_disk(tmp_path / "saved")
    sets = opened(tmp_path, tmp_path / "saved", size=8, mean=[0.0] * 3, std=[1.0] * 3)
    torch.testing.assert_close(sets.train[0][0], torch.full((3, 8, 8), 0.2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"label": "labl"}, "data.label=labl is not a column of"),
        ({"label": "x", "input": ["x", "z"]}, "data.input=z is not a column of"),
        ({"label": "x", "input": "text"}, "column text contains str 'some words', not an array of numbers"),
    ],
)
def test_wrong_columns_are_one_line(tmp_path, settings, said):
    (tmp_path / "train.json").write_text("\n".join(json.dumps({"x": n, "text": "some words"}) for n in range(30)))
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        opened(tmp_path, tmp_path / "train.json", **settings)
    assert "\n" not in str(refused.value)


def test_wrong_paths_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="none does not exist; give a dataset saved to disk"):
        opened(tmp_path, tmp_path / "none")
    with pytest.raises(ConfigError, match=r"is neither a dataset of save_to_disk nor files of one type \(\.parquet"):
        opened(tmp_path, tmp_path)
    (tmp_path / "train.json").write_text('{"x": 1}\n{"x":')
    with pytest.raises(ConfigError, match=r"data=huggingface: opening it raised") as refused:
        opened(tmp_path, tmp_path / "train.json")
    assert "\n" not in str(refused.value)
    (tmp_path / "train.json").write_text('{"x": 1}\n' * 20)
    with pytest.raises(ConfigError, match=r"data\.label is not set; choose a column of .*: x"):
        opened(tmp_path, tmp_path / "train.json", validation_fraction=0.5)


def test_the_preset_selects_columns_and_needs_a_path(tmp_path):
    words = ["model=resnet18", "data=huggingface", f"data.path={tmp_path}", "data.input=[x,z]", "run.name=rows"]
    config = load(words)
    assert isinstance(config.data, HuggingFaceConfig)
    assert config.data.input == ["x", "z"]
    assert from_yaml(to_yaml(config)) == config
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        load([word for word in words if "path" not in word])
