"""A text and a model so small that a run takes a second."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gptlite.config import Config, load
from gptlite.pretrain import pretrain

LINES = ("the cat sat on the mat", "a dog ran after the cat", "the mat lay under the dog", "no cat minds a mat")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """20 kB with something to learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i % 97} {LINES[i * i % 4]}.\n" for i in range(800)))
    return path


@pytest.fixture
def tiny(text: Path, tmp_path: Path) -> list[str]:
    """Overrides of the tiny run, but for its folder."""
    return [
        "data=text",
        f"data.path={text}",
        "data.tokenizer=byte",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.global_batch_size=4",
        "data.micro_batch_size=2",
        "model.num_layers=2",
        "model.num_heads=2",
        "model.d_model=32",
        "model.sequence_length=32",
        "schedule=constant",
        "schedule.warmup_steps=1",
        "trainer.max_steps=8",
        "trainer.log_interval=1",
        "trainer.eval_samples=8",
        "trainer.sample_tokens=8",
        "precision=fp32",
    ]


@pytest.fixture
def run(tiny: list[str], tmp_path: Path) -> Callable[..., tuple[int, Config]]:
    """Trains the tiny run with further overrides in a folder under tmp_path; gives its exit code and configuration."""

    def train(name: str, *overrides: str) -> tuple[int, Config]:
        config = load([*tiny, f"run.dir={tmp_path / name}", f"run.name={name}", *overrides])
        return pretrain(config), config

    return train
