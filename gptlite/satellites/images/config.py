"""Settings of image datasets, and of rows that may have images."""

from dataclasses import dataclass, field
from typing import Any

from gptlite.data.config import DatasetConfig


@dataclass
class ImagesConfig(DatasetConfig):
    """Settings of image datasets (gptlite/satellites/images/tensors.py).

    The shorter side is resized to `resize`, then `size` x `size` pixels are cropped from the center. With `augment`,
    training images are cropped at a random position, and half of them are flipped horizontally. If the data has no
    validation split, `validation_fraction` of it is held out, chosen by hash.
    """

    global_batch_size: int = 128
    path: str = "???"
    size: int = 224
    resize: int | None = None  # pixels of the shorter side; null: 8/7 of `size`
    augment: bool = True
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])  # red, green, blue, for pixels from 0 to 1
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    validation_fraction: float = 0.1


@dataclass
class ImageFolderConfig(ImagesConfig):
    """Images in one folder per class, in path/train and path/val (or valid, validation, test), or just in `path`."""


@dataclass
class HuggingFaceConfig(ImagesConfig):
    """Dataset that Hugging Face's `datasets` saved to disk, or local parquet, json, jsonl or csv files.

    `input` is a column, or a list of columns that are passed to the model by name; null: all columns but the label.
    `label` is a column; null: the first of labels, label, targets and target that exists. Image settings apply to
    image columns.
    """

    global_batch_size: int = 32
    input: Any = None  # str or list[str]
    label: str | None = None
