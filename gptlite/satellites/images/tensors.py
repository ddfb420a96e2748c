"""Conversion of images to tensors: resizing, cropping, flipping, normalization. Augmentation uses torch's generator."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gptlite.errors import ConfigError
from gptlite.satellites.images.config import ImagesConfig

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ToTensor:
    """Conversion of a Pillow image to fp32 [3, size, size], normalized by `mean` and `std`.

    The shorter side is resized to `short` pixels before cropping.
    """

    size: int
    short: int
    augment: bool
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, config: ImagesConfig, augment: bool) -> ToTensor:
        """Return the conversion of a configuration. Raises ConfigError for settings that are out of range."""
        short = config.size * 8 // 7 if config.resize is None else config.resize
        if config.size < 1:
            raise ConfigError(f"data.size={config.size} must be at least 1")
        if short < config.size:
            raise ConfigError(f"data.resize={short} must be at least data.size={config.size}")
        for key, values in (("mean", config.mean), ("std", config.std)):
            if len(values) != 3 or (key == "std" and min(values) <= 0):
                raise ConfigError(f"data.{key}={values} must be three numbers{' above 0' if key == 'std' else ''}")
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (config.mean, config.std))
        return cls(config.size, short, augment and config.augment, mean, std)

    def __call__(self, image: Image) -> Tensor:
        """Return the tensor of an image in any mode: gray fills all three channels, transparency is dropped."""
        image = _rgb(image)
        scale = self.short / min(image.size)
        width, height = (max(self.short, round(scale * side)) for side in image.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        if self.augment:
            left, top = (int(torch.randint(side - self.size + 1, ())) for side in (width, height))
        image = image.resize((width, height), 2).crop((left, top, left + self.size, top + self.size))  # 2: bilinear
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)
        if self.augment and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return ((pixels.float() / 255 - self.mean) / self.std).contiguous()


def _rgb(image: Image) -> Image:
    """Return the image in 8-bit RGB. 16-bit gray values are scaled, since Pillow would clip them to 255."""
    if image.mode.startswith("I"):
        from PIL import Image as pillow

        image = pillow.fromarray((np.asarray(image) / 257).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def held_out(name: str, fraction: float) -> bool:
    """Return True for a `fraction` of all names, chosen by hash, so that adding data does not change other results."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) < fraction * 2**32


def divided(names: list[str], config: ImagesConfig) -> tuple[list[int], list[int]]:
    """Return the indices of the training and of the held-out names. Raises ConfigError if either is empty."""
    fraction = config.validation_fraction
    if not 0 < fraction < 1:
        raise ConfigError(f"data.validation_fraction={fraction} must be above 0 and below 1, e.g. 0.1")
    parts: tuple[list[int], list[int]] = [], []
    for index, name in enumerate(names):
        parts[held_out(name, fraction)].append(index)
    for part, words in zip(parts, ("left to train on", "held out"), strict=True):
        if not part:
            raise ConfigError(
                f"data.validation_fraction={fraction}: none of {len(names)} samples is {words}; give another fraction"
            )
    return parts


def require(package: str, extra: str, pip_name: str = "") -> None:
    """Raise ConfigError, naming the extra, if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"the package {pip_name or package} is not installed; run pip install 'gptlite[{extra}]'")
