"""Tokenizers trained by `gptlite train-tokenizer`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gptlite.commands.train_tokenizer import Arguments
from gptlite.errors import ConfigError
from gptlite.satellites.preprocess.settings import make_settings
from gptlite.satellites.preprocess.train import train_tokenizer
from gptlite.tokenizers.base import CharTokenizer, load_tokenizer
from preprocess.corpora import as_jsonl

TRAIN = "gptlite.satellites.preprocess.train.train_sentencepiece"
TEXTS = [f"number {n}: the quick brown fox jumps over the lazy dog\n" for n in range(400)]


def settings(path: Path, validation_fraction: float = 0.0):
    return make_settings(Arguments(str(path), validation_fraction=validation_fraction))


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gptlite", "train-tokenizer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS) + b"bad\n")
    return tmp_path / "a.jsonl"


@pytest.mark.slow
def test_the_tool_trains_exports_and_overwrites_nothing(corpus: Path, tmp_path: Path) -> None:
    output, export = tmp_path / "tok", tmp_path / "hf"
    result = call(f"input={corpus}", f"output={output}", "vocab_size=330", f"export={export}")
    assert result.returncode == 0, result.stderr
    tokenizer = load_tokenizer(output)
    assert len(tokenizer.encode(" quick brown fox")) <= 6
    assert json.loads((export / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    before = (output / "tokenizer.model").read_bytes()
    result = call(f"input={corpus}", f"output={output}", "vocab_size=340")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "exists; give another folder, or overwrite=true" in result.stderr
    assert (output / "tokenizer.model").read_bytes() == before
    assert call(f"input={corpus}", f"output={output}", "vocab_size=340", "overwrite=true").returncode == 0
    assert load_tokenizer(output).vocab_size == 340


def test_nothing_is_learned_from_what_is_held_out(corpus: Path, monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "gptlite.satellites.preprocess.train.train_sentencepiece", lambda lines, *_, **__: seen.extend(lines)
    )
    train_tokenizer(settings(corpus, 0.5), "sentencepiece", 300, 64, lambda _: None)
    numbers = {line.split(":")[0] for line in seen if line}
    assert 120 < len(numbers) < 280


def test_a_large_corpus_is_sampled(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS * 200))
    monkeypatch.setattr("gptlite.satellites.preprocess.blocks.BLOCK", 1 << 16)
    seen: list[str] = []
    monkeypatch.setattr(
        "gptlite.satellites.preprocess.train.train_sentencepiece", lambda lines, *_, **__: seen.extend(lines)
    )
    train_tokenizer(settings(tmp_path), "sentencepiece", 300, 1, lambda _: None)
    assert 500_000 < sum(map(len, seen)) < 1_200_000


def test_what_is_no_text_and_what_is_too_small_are_told(corpus: Path) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"^vocab_size=100 is too small for .* characters; give at least \d+$"):
        train_tokenizer(settings(corpus), "sentencepiece", 100, 64, said.append)
    assert f"left out 1 bad record, the first at {corpus}:401: it is not JSON" in "\n".join(said)


def test_char_takes_every_character(corpus: Path) -> None:
    tokenizer = train_tokenizer(settings(corpus, 0.9), "char", 1, 64, lambda _: None)
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.alphabet == "".join(sorted(set("".join(TEXTS))))


@pytest.mark.parametrize(
    ("kind", "vocab_size", "message"), [("word", 300, "kind=word is not one of"), ("sentencepiece", 0, "vocab_size=0")]
)
def test_a_wrong_kind_or_vocabulary_size_is_refused(corpus: Path, kind: str, vocab_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_tokenizer(settings(corpus), kind, vocab_size, 64, lambda _: None)
