"""Datasets of Hugging Face's `datasets` library, read from disk for `data=huggingface`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gptlite.errors import ConfigError, did_you_mean
from gptlite.satellites.corpus.walk import files_below
from gptlite.satellites.images.config import HuggingFaceConfig
from gptlite.satellites.images.tensors import ToTensor, divided, require
from gptlite.satellites.samples.batch import TARGETS

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
VALIDATION = ("validation", "val", "valid", "test")  # split names and file name prefixes, in order of preference


class Rows:
    """Rows of a dataset as (input, label). Numbers and lists become tensors, and `convert` converts images.

    `inputs` is a column, or a list of columns that are passed to the model by name. `classes` are the values of a text
    label, in the order of their class indices.
    """

    def __init__(
        self, rows: Dataset, inputs: str | list[str], label: str, classes: list[str], convert: ToTensor
    ) -> None:
        self.rows, self.inputs, self.label, self.convert = rows, inputs, label, convert
        self.classes = {name: number for number, name in enumerate(classes)}
        self.fingerprint = ""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        row = self.rows[index]
        label = row[self.label]
        target = self._tensor(self.label, self.classes.get(label, label) if self.classes else label)
        if isinstance(self.inputs, str):
            return self._tensor(self.inputs, row[self.inputs]), target
        return {name: self._tensor(name, row[name]) for name in self.inputs}, target

    def _tensor(self, column: str, value: Any) -> Tensor:
        if hasattr(value, "convert"):  # a Pillow image
            return self.convert(value)
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"column {column} contains {type(value).__name__} {value!r:.40}, not an array of numbers; tokenize or "
                "convert it first, or choose other columns with data.input and data.label"
            ) from error


def open_huggingface(config: HuggingFaceConfig) -> tuple[Rows, Rows]:
    """Return the training and the validation rows. Raises ConfigError for missing files and columns."""
    require("datasets", "hub")
    path = Path(config.path).expanduser()
    if not path.exists():
        raise ConfigError(
            f"data.path={config.path} does not exist; give a dataset saved to disk, or .parquet, .json, .jsonl, .csv"
        )
    train, held = _splits(path, config)
    if held is None:
        mine, other = divided([str(index) for index in range(len(train))], config)
        train, held = train.select(mine), train.select(other)
    inputs, label = _columns(config, train, held)
    text = getattr(train.features[label], "dtype", "") in ("string", "large_string")
    classes = sorted(train.unique(label)) if text else []
    if text and (new := sorted(set(held.unique(label)) - set(classes))):
        raise ConfigError(f"data.label={label}: {new[0]!r} is in the validation data but not in the training data")
    first = Rows(train, inputs, label, classes, ToTensor.of(config, augment=True))
    first.fingerprint = f"{_files(path)} {inputs} {label}"
    return first, Rows(held, inputs, label, classes, ToTensor.of(config, augment=False))


def _columns(config: HuggingFaceConfig, *parts: Dataset) -> tuple[str | list[str], str]:
    """Return the input column, or a list of several, and the label column. Raises ConfigError if one is missing."""
    columns = parts[0].column_names
    label = config.label or next((name for name in TARGETS if name in columns), None)
    if label is None:
        raise ConfigError(f"data.label is not set; choose a column of {config.path}: {', '.join(columns)}")
    inputs = config.input or [name for name in columns if name != label]
    names = [inputs] if isinstance(inputs, str) else [str(name) for name in inputs]
    if not names:
        raise ConfigError(f"{config.path} has only the column {label}; a sample also needs an input")
    for key, name in (("label", label), *(("input", name) for name in names)):
        if lacking := next((each.column_names for each in parts if name not in each.column_names), None):
            has = f"which has {', '.join(lacking)}{did_you_mean(name, lacking)}"
            raise ConfigError(f"data.{key}={name} is not a column of {config.path}, {has}")
    return names if len(names) > 1 else names[0], label


def _splits(path: Path, config: HuggingFaceConfig) -> tuple[Dataset, Dataset | None]:
    """Return the training rows, and the validation rows if the data has them."""
    from datasets import load_dataset, load_from_disk

    if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        found: Any = load_from_disk(str(path))
        if not isinstance(found, Mapping):
            return found, None
        parts: dict[Any, Any] = dict(found)
    else:
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in READERS)
        kinds = {READERS.get(file.suffix) for file in files}
        if len(kinds) != 1 or None in kinds:
            raise ConfigError(
                f"data.path={config.path} is neither a dataset of save_to_disk nor files of one type "
                f"({', '.join(READERS)})"
            )
        names = {part: [str(file) for file in files if file.name.startswith(part)] for part in ("train", *VALIDATION)}
        held = next((part for part in VALIDATION if names[part]), None)
        if not names["train"]:
            names, held = {"train": [str(file) for file in files]}, None
        names = {part: names[part] for part in ("train", held) if part}
        cache = Path(config.cache_dir).expanduser() / "huggingface"
        parts = dict(load_dataset(kinds.pop() or "", data_files=names, cache_dir=str(cache)))
    if "train" not in parts:
        raise ConfigError(f"data.path={config.path} has the splits {', '.join(parts)}, but no split train")
    return parts["train"], next((parts[name] for name in VALIDATION if name in parts), None)


def _files(path: Path) -> Sequence[tuple[str, int]]:
    """Return the names and sizes of a dataset's files. They identify the data even after it is moved."""
    if path.is_file():
        return [(path.name, path.stat().st_size)]
    found = files_below(path, "data.path", hidden=True)
    return sorted((file.relative_to(path).as_posix(), file.stat().st_size) for file in found)
