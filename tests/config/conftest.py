"""Composition as users compose."""

import hydra
import pytest

from gptlite.config import compose


@pytest.fixture
def composed_by_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets are read and merged each time: see composition.py."""
    monkeypatch.setattr(compose, "compose", hydra.compose)
