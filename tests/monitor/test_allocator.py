"""torch's allocator of GPU memory at the start of a run."""

import pytest
import torch

from gptlite.start import pretrain as start
from gptlite.torch_private.allocator import set_allocator


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that a run makes where there is a GPU of which this process holds no memory."""
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr("gptlite.start.pretrain.set_allocator", settings.append)
    for name in start.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return settings


def test_segments_grow_by_default(asked: list[str]) -> None:
    start.grow_segments()
    assert asked == ["expandable_segments:True"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_the_users_settings_stay(asked: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "expandable_segments:False")
    start.grow_segments()
    assert asked == []


def test_nothing_changes_for_tensors_on_the_gpu_or_without_one(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 << 20)
    start.grow_segments()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    start.grow_segments()
    assert asked == []


def test_torch_takes_the_setting_without_starting_cuda() -> None:
    before = torch.cuda.is_initialized()
    set_allocator("expandable_segments:True")
    assert torch.cuda.is_initialized() == before
    with pytest.raises((ValueError, RuntimeError)):
        set_allocator("expandable_segments:perhaps")
