"""A pipe, a socket or a device among files of others is refused by name: opening or reading it would never end."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import snapshot

from gptlite.checkpoint.huggingface import load_pickle, open_weights
from gptlite.checkpoint.manifest import verify
from gptlite.config import load
from gptlite.config.saved import read_saved
from gptlite.data.indexed import IndexedDataset
from gptlite.data.order_log import note_spike, read_order
from gptlite.errors import ConfigError
from gptlite.metrics.jsonl import read_rows
from gptlite.satellites.checkpoint_tool import diff, places
from gptlite.satellites.corpus.sources import SourceFile
from gptlite.satellites.corpus.text import scan, split_text
from gptlite.satellites.data_tool.foreign import open_datatrove, open_llmc, open_nanogpt
from gptlite.satellites.images.folder import ImageFolder
from gptlite.satellites.preprocess.inputs import find_sources
from gptlite.satellites.preprocess.streams import Stream
from gptlite.satellites.sweep.folder import SweepFolder
from gptlite.start.pretrain import pretrain
from gptlite.tokenizers.base import load_tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.tokenizers.tiktoken import is_ranks

SECONDS = 20  # a hang ends in an error


def named(name: str, read: Callable[[Path], Any]) -> Any:
    return pytest.param(name, read, id=name)


def image(path: Path) -> Any:
    return ImageFolder(path.parent, [path.name], ["a"], lambda _: torch.empty(0))[0]  # pyright: ignore[reportArgumentType]


# The file, and what reads it.
READERS = [
    named("MANIFEST.json", lambda path: verify(path.parent, print)),
    named("config.yaml", read_saved),
    named("of diff.yaml", lambda path: diff.config_of(diff.read_text(path), str(path))),
    named(".lock", lambda path: places.has_writer(path.parent)),
    named("metrics.jsonl", read_rows),
    named("data_order.jsonl", lambda path: read_order(path.parent)),
    named("data_order.jsonl", lambda path: note_spike(path.parent, 1, 1, (0, 1))),
    named("model.safetensors", lambda path: open_weights(path.parent, str)),
    named("model.safetensors.index.json", lambda path: open_weights(path.parent, str)),
    named("pytorch_model.bin", lambda path: open_weights(path.parent, str)),
    named("consolidated.00.pth", lambda path: load_pickle(path, mapped=True)),
    named("definition.json", lambda path: load_tokenizer(path.parent)),
    named("tokenizer.json", lambda path: find_tokenizer(str(path))),
    named("tokenizer.model", lambda path: find_tokenizer(str(path))),
    named("ranks.tiktoken", lambda path: find_tokenizer(str(path))),
    named("ranks.model", is_ranks),
    named("train.idx", lambda path: IndexedDataset(path.with_suffix(""))),
    named("train.bin", lambda path: open_nanogpt(path, None, 100)),
    named("train.ds", open_datatrove),
    named("tekken.json", lambda path: find_tokenizer(str(path))),
    named("llmc.bin", open_llmc),
    named("text.txt", lambda path: scan([path], print)),
    named("cut.txt", lambda path: split_text(path, 0.1)),
    named("cifar.whl", lambda path: SourceFile("c", "n", "0" * 64, "1 MB")._checked(str(path), path)),
    named("image.png", image),
    named("docs.jsonl", lambda path: find_sources(str(path), "auto")),
    named("docs.parquet", lambda path: find_sources(str(path), "auto")),
    named("docs.txt", lambda path: Stream(str(path))),
    named("sweep.json", lambda path: SweepFolder(path.parent).header),
]


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_pipe_is_refused_by_name(tmp_path: Path, name: str, read: Callable[[Path], Any]):
    os.mkfifo(path := tmp_path / name)
    with pytest.raises(ConfigError, match=name) as refusal:
        read(path)
    assert "\n" not in str(refusal.value)
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["config.yaml", "train.log", "metrics.jsonl", "data_order.jsonl", ".owner"])
def test_a_run_does_not_wait_for_a_pipe_in_its_folder(tiny: list[str], tmp_path: Path, name: str):
    (folder := tmp_path / "run").mkdir()
    os.mkfifo(folder / name)

    def train() -> int:
        config = load([*tiny, f"run.dir={folder}", "run.name=x", "trainer.max_steps=2"])
        return pretrain(config).exit_code

    if name == ".owner":  # only a note
        assert train() == 0
    else:
        with pytest.raises((ConfigError, OSError), match=name):
            train()


def test_a_socket_is_refused_by_name(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("metrics.jsonl")
        with pytest.raises(ConfigError, match=r"metrics\.jsonl is a socket"):
            read_rows(tmp_path / "metrics.jsonl")
    assert snapshot(tmp_path) == {}
