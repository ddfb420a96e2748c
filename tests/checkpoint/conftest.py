import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors


class FakeTokenizer:
    """Two files of a few hundred bytes, one in a folder of its own. Fails if told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    saved_bytes = (389, 120)

    def save(self, folder: Path) -> None:
        if self.error:
            raise self.error
        (folder / "vocab.txt").write_text("".join(f"token{number}\n" for number in range(50)))
        (folder / "extra").mkdir()
        (folder / "extra" / "merges.txt").write_text("a b\n" * 30)


def disk_full(*_: object, **__: object) -> None:
    """Stands in for a function that writes."""
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def failing_at(module: Any, name: str, call: int | None, error: BaseException) -> Iterator[list[int]]:
    """Makes a function raise at its n-th call, from 0; None: never. Gives a list that grows by one with each call."""
    original, calls = getattr(module, name), []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == call:
            raise error
        return original(*args, **kwargs)

    with patch.object(module, name, wrapped):
        yield calls


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor, row by row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {key: bits(tensor) for key, tensor in tensors.items()}


def fresh(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the same shapes and dtypes, to load into."""
    return {key: torch.full_like(tensor, 3) for key, tensor in tensors.items()}


def read_bits(folder: Path, like: dict[str, Tensor]) -> dict[str, bytes]:
    """The bytes of all tensors of a checkpoint, which has those of `like`."""
    load_tensors(folder, into := fresh(like))
    return all_bits(into)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Every dtype of a training state, and awkward ones: 0-dim, empty, non-finite, a view, a transpose."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 8, generator=generator)
    weight[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    return {
        "embedding.weight": weight,
        "layers.0.attention.qkv.weight": torch.randn(6, 24, generator=generator).t(),
        "layers.0.norm.weight": torch.randn(100, generator=generator)[3:7],
        "half": torch.randn(33, generator=generator).bfloat16(),
        "optim.embedding.weight.step": torch.tensor(100.0),
        "count": torch.tensor(2**62 + 1),
        "ids": torch.arange(-5, 5),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture
def checkpointer(tmp_path: Path) -> Checkpointer:
    return Checkpointer(CheckpointConfig(keep=0), tmp_path / "run")


@pytest.fixture
def save(checkpointer: Checkpointer, tensors: dict[str, Tensor]) -> Callable[[int], Path]:
    """Saves the tensors under a step; the first element of the embedding tells which."""

    def at(step: int) -> Path:
        tensors["embedding.weight"][0, 0] = step
        return checkpointer.save(tensors, {"step": step}, "seed: 1\n", FakeTokenizer(), print)

    return at
