"""Tokenizers of other libraries: pieces, round trips, and what names them."""

import base64
import io
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers as rust
import transformers

from gptlite.errors import ConfigError
from gptlite.tokenizers.base import ByteTokenizer, CharTokenizer, StreamDecoder, Tokenizer, load_tokenizer
from gptlite.tokenizers.export import export_tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.tokenizers.huggingface import byte_alphabet
from gptlite.tokenizers.sentence_piece import SentencePieceTokenizer, train_sentencepiece

LINES = [
    "the quick brown fox jumps over the lazy dog, again and again",
    "naïve 漢字 in 12345 lines",
    "aaaa aaa hahaha",
] * 9
TEXTS = [
    "the quick brown fox\n\n  jumps\tover 1234567",
    "emoji 😀👩‍👩‍👧 and 漢字かな\r\n \x00 \x7f é e\u0301 \ufeff",
    "<|endoftext|><s></s><unk><0x0A> ▅ ﬁ Å",
    " leading\r\nwindows\r\n\n\n\n double   triple spaces",
    "   leading, trailing   ",
    "",
    "\n",
]
ADVERSARIAL = [*"the quick \n", "  ", "   ", "aaaa", "aaa", "haha", "\n\n", "\t", "é", "漢", "😀", "\0"]
ADVERSARIAL += ["<s>", "</s>", "<0x0A>", "\u2581"]


def byte_level(folder: Path) -> Path:
    """A tokenizer.json of byte-level BPE."""
    tokenizer = rust.Tokenizer(rust.models.BPE())
    tokenizer.pre_tokenizer = rust.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = rust.decoders.ByteLevel()
    alphabet = rust.pre_tokenizers.ByteLevel.alphabet()
    trainer = rust.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|a|>", "<|b|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def ranks(folder: Path) -> Path:
    """A .tiktoken file: the bytes, and some pairs."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" q", b"ui", b"aa", b"\n\n", "漢".encode()]
    lines = [base64.b64encode(piece).decode() + f" {token}" for token, piece in enumerate(pieces)]
    (folder / "small.tiktoken").write_text("\n".join(lines) + "\n")
    return folder / "small.tiktoken"


def piece_model(folder: Path) -> Path:
    train_sentencepiece(LINES, 330, lambda _: None).save(folder / "sp")
    return folder / "sp" / "tokenizer.model"


def characters(folder: Path) -> Path:
    CharTokenizer(set("".join(TEXTS))).save(folder)
    return folder


MAKE = {
    "huggingface": byte_level,
    "tiktoken": ranks,
    "sentencepiece": piece_model,
    "char": characters,
    "byte": lambda _: "byte",
}


@pytest.fixture(scope="module", params=MAKE)
def found(request, tmp_path_factory) -> Tokenizer:
    tokenizer = find_tokenizer(str(MAKE[request.param](tmp_path_factory.mktemp(request.param))))
    assert tokenizer.kind == request.param
    return tokenizer


def test_nothing_is_lost_and_bytes_are_counted(found: Tokenizer) -> None:
    for text in TEXTS:
        ids = found.encode(text)
        assert found.decode(ids) == text
        assert found.token_bytes()[ids].sum() == len(text.encode())
        assert found.eod not in ids  # though the text spells it out
        assert np.array_equal(found.encode_array(text), ids)
        assert found.encode_array(text).dtype == np.int32
    trained = found.kind not in ("char", "byte")
    assert (len(found.encode("the quick")) < len("the quick")) == trained
    assert found.piece(found.eod) == found.decode([found.eod]).encode() == b""
    assert found.token_bytes().shape == (found.vocab_size,)
    assert 0 <= found.eod < found.vocab_size


def test_any_ids_stream_to_the_text_they_decode_to(found: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(-3, found.vocab_size + 9) for _ in range(rng.randrange(40))]
        stream = StreamDecoder(found)
        assert "".join([stream.push(token) for token in ids]) + stream.flush() == found.decode(ids)


def test_saved_and_found_again_by_every_path(found: Tokenizer, tmp_path: Path) -> None:
    found.save(tmp_path / "tokenizer")
    for loaded in (load_tokenizer(tmp_path / "tokenizer"), find_tokenizer(str(tmp_path))):
        assert loaded.fingerprint == found.fingerprint
        assert (loaded.eod, loaded.pieces) == (found.eod, found.pieces)
        assert [loaded.encode(text) for text in TEXTS] == [found.encode(text) for text in TEXTS]


def test_the_alphabet_of_bytes_is_hugging_faces() -> None:
    assert set(byte_alphabet()) == set(rust.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = rust.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, range(1, 0x250)):
        (written, _), *_ = tokenizer.pre_tokenize_str(character)
        assert bytes(byte_alphabet()[each] for each in written) == character.encode()


def test_the_end_of_documents_can_be_named(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    assert find_tokenizer(str(path), eod="<|a|>").eod == 1
    with pytest.raises(ConfigError, match="the text 'the' is encoded as the token the, so a text could end a document"):
        find_tokenizer(str(path), eod="the")
    with pytest.raises(ConfigError, match="has no token <end> to end documents with"):
        find_tokenizer(str(path), eod="<end>")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|b|>"}}')
    assert find_tokenizer(str(tmp_path)).eod == 2


def test_a_vocabulary_that_does_not_keep_bytes_is_refused(tmp_path: Path) -> None:
    tokenizer = rust.Tokenizer(rust.models.WordPiece({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    tokenizer.decoder = rust.decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="its decoder is WordPiece"):
        find_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "cannot be read"),
        ("a.model", "x", "it is not a SentencePiece model"),
        ("a.tiktoken", "!!! 1", "a.tiktoken:1 is not a base64 string and its id"),
        ("a.tiktoken", "YQ== 1", "byte 0x00 has no id"),
        ("a.txt", "x", "does not end in .json, .model or .tiktoken"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        find_tokenizer(str(tmp_path / name))
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere", "there is no file or folder nowhere"),
        (".", "holds none of definition.json, tokenizer/definition.json, tokenizer.json, tokenizer.model"),
        ("sentencepiece", "must be trained first: .*train.tokenizer(.py)?'? kind=sentencepiece input="),
        ("tiktoken:gpt7", "is not an encoding of tiktoken: .*gpt2"),
    ],
)
def test_what_was_tried_is_named(tmp_path: Path, monkeypatch, spec: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        find_tokenizer(spec)
    assert isinstance(find_tokenizer("byte"), ByteTokenizer)


def test_an_exported_model_has_the_same_ids_in_transformers(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(piece_model(tmp_path)))
    export_tokenizer(tokenizer, tmp_path / "hf")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (other.eos_token_id, len(other)) == (tokenizer.eod, tokenizer.vocab_size)
    rng = random.Random(0)
    words = [*ADVERSARIAL, *(tokenizer.decode([token]) for token in range(tokenizer.vocab_size))]
    for text in [*TEXTS, *LINES, *("".join(rng.choices(words, k=rng.randrange(40))) for _ in range(2000))]:
        ids = tokenizer.encode(text)
        assert other.encode(text) == ids
        assert other.decode(ids) == tokenizer.decode(ids)
    assert find_tokenizer(str(tmp_path / "hf")).pieces[3:] == tokenizer.pieces[3:]


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="this byte tokenizer is not one"):
        export_tokenizer(ByteTokenizer(), tmp_path / "hf")
    tokenizer = find_tokenizer(str(piece_model(tmp_path)))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    monkeypatch.setattr(type(tokenizer.processor), "get_score", lambda _, token: float(token))  # the wrong order
    with pytest.raises(ConfigError, match="has different ids for"):
        export_tokenizer(tokenizer, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_the_end_of_a_sentencepiece_model_is_a_control_piece(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=330,
        hard_vocab_limit=False,
        byte_fallback=True,
        eos_id=-1,
        control_symbols=["<end>", "<turn>"],
        user_defined_symbols=["<seen>"],
        minloglevel=2,
    )
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(ConfigError, match=r"has no end-of-sentence piece .*; give eod= one of .*, <s>, <end>, <turn>$"):
        find_tokenizer(str(path))
    for wrong in ("<seen>", "the", "<gone>"):
        with pytest.raises(ConfigError, match=f"has no control piece {wrong} to end documents with"):
            find_tokenizer(str(path), wrong)
    ends = [find_tokenizer(str(path), name) for name in ("<end>", "<turn>")]
    assert [each.eod for each in ends] == [ends[0].processor.piece_to_id(name) for name in ("<end>", "<turn>")]
    assert ends[0].fingerprint != ends[1].fingerprint
    for each in ends:
        each.save(tmp_path / "saved")
        again = load_tokenizer(tmp_path / "saved")
        assert (again.eod, again.fingerprint) == (each.eod, each.fingerprint)


def test_an_end_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "tokenizer")
    for spec in ("byte", str(tmp_path)):
        with pytest.raises(ConfigError, match=f"eod=<end>: tokenizer={spec} has an end-of-document token of its own"):
            find_tokenizer(spec, "<end>")
