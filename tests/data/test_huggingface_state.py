"""A tokenizer.json of others changes no document: what it was saved with is ignored, and what loses text is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers as rust
from token_folders import write_folder

from gptlite.errors import ConfigError
from gptlite.satellites.data_tool import verify
from gptlite.tokenizers.base import load_tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.tokenizers.huggingface import HuggingFaceTokenizer, byte_alphabet

TEXT = "the cat sat on the mat, 東京 é <|endoftext|> the end " * 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(special: bool = True, left_out: str = "") -> rust.Tokenizer:
    """Byte-level BPE with two merges."""
    vocabulary = {each: n for n, each in enumerate(each for each in byte_alphabet() if each not in left_out)}
    size = len(vocabulary)
    made = rust.Tokenizer(rust.models.BPE({**vocabulary, "th": size, "the": size + 1}, [("t", "h"), ("th", "e")]))
    made.pre_tokenizer, made.decoder = rust.pre_tokenizers.ByteLevel(False), rust.decoders.ByteLevel()
    made.add_tokens([rust.AddedToken("<|endoftext|>", special=special)])
    return made


def saved(made: rust.Tokenizer, folder: Path, **model: Any) -> str:
    """Write a tokenizer.json, with further keys of its model, and return its path."""
    content = json.loads(made.to_str())
    content["model"] |= model
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("truncation", lambda made: made.enable_truncation(8)),
        ("padding", lambda made: made.enable_padding(length=2000, pad_id=3)),
        ("truncation and padding", lambda made: (made.enable_truncation(8), made.enable_padding(length=2000))),
        ("dropout", lambda made: setattr(made.model, "dropout", 0.9)),
    ],
)
def test_state_that_was_saved_with_a_tokenizer_changes_no_document(
    words: str, change: Callable[[rust.Tokenizer], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = find_tokenizer(saved(byte_level(), tmp_path))
    made = byte_level()
    change(made)
    path = saved(made, tmp_path)
    found = find_tokenizer(path)
    assert found.encode(TEXT) == clean.encode(TEXT)
    assert found.decode(found.encode(TEXT)) == TEXT
    assert not found.warning
    found.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").fingerprint == found.fingerprint
    assert not load_tokenizer(tmp_path / "saved").warning
    # A folder that an older version prepared.
    older = HuggingFaceTokenizer(Path(path).read_bytes(), found.eod)
    assert older.encode(TEXT) == clean.encode(TEXT)
    assert older.warning.startswith(f"its tokenizer.json was saved with {words}, by which documents may")
    write_folder(tmp_path / "data", older)
    assert verify.run([str(tmp_path / "data")], verify.Options()) == 0
    assert f"warning  {tmp_path / 'data' / 'train'}: its tokenizer.json was saved with" in capsys.readouterr().out


def test_a_text_that_spells_the_end_of_a_document_is_plain_text(tmp_path: Path) -> None:
    found = find_tokenizer(saved(byte_level(special=False), tmp_path))
    assert found.eod not in found.encode(TEXT)
    assert found.decode(found.encode(TEXT)) == TEXT
    assert found.token_bytes()[found.eod] == 0
    assert found.token_bytes()[found.encode(TEXT)].sum() == len(TEXT.encode())


def unigram(byte_fallback: bool, pieces: list[str]) -> rust.Tokenizer:
    scores = [("<unk>", 0.0), ("</s>", 0.0), *((each, -5.0) for each in pieces), *(("\u2581the", -1.0), ("t", -2.0))]
    made = rust.Tokenizer(rust.models.Unigram(scores, 0, byte_fallback))
    made.decoder = rust.decoders.Sequence([rust.decoders.ByteFallback(), rust.decoders.Metaspace()])
    made.add_special_tokens([rust.AddedToken("</s>", special=True)])
    return made


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (byte_level(left_out="éĠ"), "loses characters: 2 of 256 bytes have no token (0x20, 0xE9)"),
        (unigram(False, []), "loses characters: 256 of 256 bytes have no token (0x00, 0x01, 0x02, 0x03, ...)"),
        (unigram(True, BYTES[:-1]), "loses characters: 1 of 256 bytes have no token (0xFF)"),
        (unigram(False, BYTES), "it has tokens for all bytes, but its byte_fallback is off"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_loses_characters_is_refused(made: rust.Tokenizer, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        find_tokenizer(saved(made, tmp_path))
    assert words in str(refusal.value)


def test_a_normalizer_is_allowed_and_named(tmp_path: Path) -> None:
    made = byte_level()
    assert find_tokenizer(saved(made, tmp_path)).changes == ""
    made.normalizer = rust.normalizers.Sequence([rust.normalizers.NFC(), rust.normalizers.Lowercase()])
    assert find_tokenizer(saved(made, tmp_path)).changes == "NFC, Lowercase"
