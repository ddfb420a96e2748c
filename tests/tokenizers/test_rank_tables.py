"""Files of ranks and Mistral's tekken.json: pattern and ids are those of the libraries that made them."""

import base64
import json
from pathlib import Path

import pytest
import regex
from tiktoken_ext import openai_public

from gptlite.errors import ConfigError
from gptlite.tokenizers.base import load_tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.tokenizers.rank_tables import CL100K, LLAMA_3, O200K, QWEN, TABLES, Table
from gptlite.tokenizers.sentence_piece import train_sentencepiece
from gptlite.tokenizers.tiktoken import TiktokenTokenizer

PIECES = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" t", "東".encode(), b"12", b"\n\n"]
WORDS = [
    "I'LL don't",
    "naïve",
    "漢字かな",
    "తెలుగు",
    "HelloWorld",
    "1234567",
    "/path//x",
    " \r\n\t",
    "e\u0301",
    "😀",
    "?!",
    "   ",
]


def table(path: Path, pieces: list[bytes] = PIECES) -> Path:
    path.write_bytes(b"".join(base64.b64encode(each) + b" %d\n" % rank for rank, each in enumerate(pieces)))
    return path


@pytest.mark.parametrize(
    ("name", "size"), [("r50k_base", 50256), ("p50k_base", 50280), ("cl100k_base", 100256), ("o200k_base", 199998)]
)
def test_tables_are_those_of_tiktoken(monkeypatch, name: str, size: int) -> None:
    """`size` is the number of ranks in the files that tiktoken downloads."""
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    theirs, ours = openai_public.ENCODING_CONSTRUCTORS[name](), TABLES[size]
    assert (ours.pattern, ours.special(set(range(size)))) == (theirs["pat_str"], theirs["special_tokens"])


def test_patterns_differ() -> None:
    assert [regex.findall(pattern, "Don't 12345/")[-3:] for pattern in (CL100K, QWEN, O200K)] == [
        ["123", "45", "/"],
        ["4", "5", "/"],
        ["123", "45", "/"],
    ]
    assert [regex.findall(pattern, "a\n ") for pattern in (CL100K, LLAMA_3)] == [["a", "\n "], ["a", "\n", " "]]
    assert regex.findall(O200K, "HelloWorld తెలుగు") == ["Hello", "World", " తెలుగు"]
    assert len(regex.findall(CL100K, "HelloWorld తెలుగు")) > 3


@pytest.mark.parametrize(("ranks", "size", "turn"), [(128000, 128256, "<|eot_id|>"), (200000, 202048, "<|eot|>")])
def test_llamas_special_tokens_follow_the_ranks(ranks: int, size: int, turn: str) -> None:
    """Vocabulary sizes and ids as in the config.json of Llama 3 and 4: begin, end and end of turn."""
    special = TABLES[ranks].special(set(range(ranks)))
    assert sorted(special.values()) == list(range(ranks, size))
    assert special["<|begin_of_text|>"] == ranks
    assert special[TABLES[ranks].eod] == ranks + 1
    assert special[turn] == ranks + (9 if ranks == 128000 else 8)


@pytest.mark.parametrize("name", ["tokenizer.model", "any.tiktoken"])
def test_a_published_table_is_known_by_its_number_of_ranks(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setitem(TABLES, len(PIECES), Table(QWEN, {300: "<end>", 302: "<turn>"}, 305, "<end>"))
    found = find_tokenizer(str(table(tmp_path / name)))
    assert (found.eod, found.vocab_size) == (300, 305)
    assert found.encode("the 12") == [257, 32, 49, 50]  # QWEN cuts between digits
    assert find_tokenizer(str(tmp_path / name), "<turn>").eod == 302
    with pytest.raises(ConfigError, match=r"no special token <s>; the special tokens are <end>, <turn>$"):
        find_tokenizer(str(tmp_path / name), "<s>")


def test_an_unknown_table_has_gpt2s_pattern_only_if_named_tiktoken(tmp_path: Path) -> None:
    assert find_tokenizer(str(table(tmp_path / "my.tiktoken"))).eod == len(PIECES)
    with pytest.raises(ConfigError, match=f"tokenizer.model has {len(PIECES)} ranks, where Llama 3 has 128,000"):
        find_tokenizer(str(table(tmp_path / "tokenizer.model")))


def tekken(path: Path, special: list[str] | None = None, count: int = 5, **config: object) -> Path:
    rows = [{"rank": n, "token_bytes": base64.b64encode(each).decode()} for n, each in enumerate([*PIECES, b"unused"])]
    about = {"pattern": QWEN, "default_vocab_size": len(PIECES) + count, "default_num_special_tokens": count, **config}
    named = [{"rank": n, "token_str": name, "is_control": True} for n, name in enumerate(special or [])]
    path.write_text(json.dumps({"config": about, "vocab": rows, "special_tokens": named or None}))
    return path


@pytest.mark.parametrize("name", ["tekken.json", "tekken_240911.json", "renamed.json"])
def test_tekkens_ranks_follow_its_special_tokens(tmp_path: Path, name: str) -> None:
    """As mistral-common 1.13.1 reads it: id = rank + number of special tokens, and ranks beyond the vocabulary size
    are not used. Its own tekken_240911.json and tekken_240718.json gave the same ids for 300 texts."""
    found = find_tokenizer(str(tekken(tmp_path / name)))
    assert (found.eod, found.vocab_size) == (2, len(PIECES) + 5)
    assert found.encode("the 12") == [257 + 5, 32 + 5, 49 + 5, 50 + 5]
    assert found.encode("</s>unused") == [5 + byte for byte in b"</s>unused"]
    assert found.decode(found.encode("".join(WORDS))) == "".join(WORDS)
    found.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.fingerprint, again.encode("the 東")) == (found.fingerprint, found.encode("the 東"))


def test_tekken_in_a_folder_with_names_of_its_own(tmp_path: Path) -> None:
    tekken(tmp_path / "tekken.json", ["<unk>", "<s>", "</s>", "[INST]"])
    assert find_tokenizer(str(tmp_path), "[INST]").eod == 3
    with pytest.raises(ConfigError, match=r"no special token <x>; the special tokens are <unk>, <s>, </s>, \[INST\]"):
        find_tokenizer(str(tmp_path), "<x>")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"default_vocab_size": 2000}, "its ranks are not 0 to"),
        ({"default_vocab_size": 100}, "byte 0x5f has no id"),
        ({"pattern": 3}, "config.pattern"),
    ],
)
def test_a_wrong_tekken_is_named(tmp_path: Path, config: dict[str, object], said: str) -> None:
    path = tekken(tmp_path / "tekken.json", **config)
    if config.get("default_vocab_size") == 2000:
        content = json.loads(path.read_text())
        content["vocab"][-1]["rank"] = 999
        path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said) as error:
        find_tokenizer(str(path))
    assert "tekken.json" in str(error.value)


def test_mistral_appends_a_version_to_model(tmp_path: Path) -> None:
    train_sentencepiece(["some words of text"] * 9, 300, lambda _: None).save(tmp_path / "sp")
    (tmp_path / "tokenizer.model.v3").write_bytes((tmp_path / "sp" / "tokenizer.model").read_bytes())
    found = find_tokenizer(str(tmp_path / "tokenizer.model.v3"))
    assert found.kind == "sentencepiece"
    assert not isinstance(found, TiktokenTokenizer)
