from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig


class FakeTokenizer:
    """Two files of a few hundred bytes, one in a folder of its own."""

    def save(self, folder: Path) -> None:
        (folder / "vocab.txt").write_text("".join(f"token{number}\n" for number in range(50)))
        (folder / "extra").mkdir()
        (folder / "extra" / "merges.txt").write_text("a b\n" * 30)


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor, row by row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


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
