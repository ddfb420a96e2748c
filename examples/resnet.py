"""ResNet-18 (He et al. 2015, arXiv:1512.03385) on CIFAR-10 or random images, as a plugin: a model and two datasets.

python train.py plugins=[examples.resnet] model=resnet18 data=fake_images precision=fp32
python train.py plugins=[examples.resnet] model=resnet18 data=cifar10 data.path=cifar-10-batches-py
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.errors import ConfigError
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec
from gptlite.unpickle import unpickle

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from gptlite.ops.select import Ops

CLASSES, SIZE = 10, 32


@dataclass
class ResNetConfig(ModelConfig):
    """ResNet of four groups of `blocks` basic blocks each. The groups have 1, 2, 4 and 8 times `width` channels.

    `norm`: `batch`, or `group`, whose statistics do not depend on the batch.
    """

    name: str = "ResNet-18"
    peak_lr: float = 0.001
    blocks: int = 2
    width: int = 64
    norm: str = "batch"


class ResNetSpec(ModelSpec[ResNetConfig]):
    """ModelSpec of a ResNet: a stem, the basic blocks and a head, each of which maps a tensor to a tensor."""

    name = "resnet18"
    schema = ResNetConfig
    reads = "samples"
    metrics = ("accuracy",)
    positive = ("blocks", "width")

    def check(self, config: ResNetConfig) -> None:
        """Raise ConfigError for an unknown norm."""
        if config.norm not in ("batch", "group"):
            raise ConfigError(f"model.norm={config.norm} must be batch or group")

    def build(self, config: ResNetConfig, ops: Ops, seed: int) -> nn.Module:
        """Return the module. Its parameters are those of torchvision's ResNet-18: 11,181,642 for ten classes."""
        from torch import nn

        from examples.resnet_layers import BasicBlock, norm_of

        channels = config.width
        first = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        stem = nn.Sequential(first, norm_of(config.norm, channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        layers: dict[str, nn.Module] = {"stem": stem}
        for group in range(4):
            for block in range(config.blocks):
                width, stride = config.width << group, 2 if group and not block else 1
                layers[f"group{group}_{block}"] = BasicBlock(channels, width, stride, config.norm)
                channels = width
        layers["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
        return nn.Sequential(OrderedDict(layers))


@dataclass
class FakeImagesConfig(DatasetConfig):
    """Random images of ten classes: noise added to one random image per class, so that a model can learn them."""

    global_batch_size: int = 32
    samples: int = 2048
    noise: float = 1.0


@dataclass
class CifarConfig(DatasetConfig):
    """CIFAR-10 in its published format (the Python version): a folder with data_batch_1 to 5 and test_batch."""

    global_batch_size: int = 128
    path: str = "???"
    augment: bool = True  # random crops and flips


class Images:
    """Images fp32 [3, 32, 32] and class indices. `augment` crops and flips images at random."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, augment: bool, fingerprint: str) -> None:
        self.images, self.labels, self.augment, self.fingerprint = images, labels, augment, fingerprint

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import torch
        import torch.nn.functional as F

        image = torch.from_numpy(self.images[index])
        image = (image.float() / 127.5 - 1) if image.dtype == torch.uint8 else image
        if self.augment:
            top, left, flip = torch.randint(9, ()), torch.randint(9, ()), torch.rand(()) < 0.5
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + SIZE, left : left + SIZE]
            image = image.flip(2) if flip else image
        return image, int(self.labels[index])


def open_fake(config: FakeImagesConfig) -> tuple[Images, Images]:
    """Return training images, and one eighth as many validation images."""
    import numpy as np

    draw = np.random.default_rng(0)
    centers = draw.standard_normal((CLASSES, 3, SIZE, SIZE), dtype=np.float32)

    def images(count: int) -> Images:
        labels = draw.integers(CLASSES, size=count)
        noise = draw.standard_normal((count, 3, SIZE, SIZE), dtype=np.float32)
        return Images(centers[labels] + np.float32(config.noise) * noise, labels, False, f"fake {config.noise}")

    if config.samples < 1:
        raise ConfigError(f"data.samples={config.samples} must be at least 1")
    return images(config.samples), images(max(1, config.samples // 8))


class _Array:
    """Array of bytes from a file: its shape and content, once `set_state` has checked them."""

    shape: tuple[int, ...] = ()
    content = b""

    def set_state(self, state: Any) -> None:
        """Set the state of numpy's array: (version, shape, dtype, is Fortran, bytes)."""
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _UInt8) or fortran or not isinstance(content, bytes) or prod(shape) != len(content):
            raise pickle.UnpicklingError("an array does not consist of bytes")
        self.shape, self.content = tuple(shape), content


class _UInt8:
    """Numpy's dtype uint8, whose state is always the same."""


def _dtype(name: Any, *_: Any) -> _UInt8:
    if name not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"an array has the dtype {name!r:.20}, not uint8")
    return _UInt8()


def _new_array(*_: Any) -> _Array:
    return _Array()


def _latin1(text: str, _: Any) -> bytes:
    return text.encode("latin1")


NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _latin1,
}
SETTERS = {_Array: _Array.set_state, _UInt8: lambda dtype, state: None}


def open_cifar(config: CifarConfig) -> tuple[Images, Images]:
    """Return the 50,000 training and 10,000 test images. Raises ConfigError for a missing or damaged file."""
    import numpy as np

    def read(*names: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = [], []
        for name in names:
            path = Path(config.path).expanduser() / name
            try:
                content = unpickle(path.read_bytes(), NAMES, SETTERS, encoding="bytes")
                array = np.frombuffer(content[b"data"].content, np.uint8)
                images.append(array.reshape(-1, 3, SIZE, SIZE))
                labels.append(np.asarray(content[b"labels"], dtype=np.int64))
            except (OSError, pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ConfigError(
                    f"data.path={config.path}: {name} cannot be read ({reason}); "
                    "give the folder cifar-10-batches-py of CIFAR-10's Python version"
                ) from error
        return np.concatenate(images), np.concatenate(labels)

    train, test = read(*(f"data_batch_{number}" for number in range(1, 6))), read("test_batch")
    return Images(*train, config.augment, "cifar10"), Images(*test, False, "cifar10")


register_model(ResNetSpec())
register_data("fake_images", FakeImagesConfig, open_fake)
register_data("cifar10", CifarConfig, open_cifar)
