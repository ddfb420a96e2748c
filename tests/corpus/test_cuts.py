"""Long texts that are encoded a part at a time have the tokens of the whole text, whatever the tokenizer."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers as rust

from gptlite.satellites.corpus import cuts
from gptlite.satellites.corpus.cuts import encoded, last_cut
from gptlite.satellites.preprocess import blocks
from gptlite.satellites.preprocess.encode import Encoder
from gptlite.satellites.preprocess.inputs import find_sources
from gptlite.satellites.preprocess.pieces import InputPlace
from gptlite.tokenizers.base import ByteTokenizer, Tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.tokenizers.rank_tables import GPT2, LLAMA_3, O200K
from gptlite.tokenizers.sentence_piece import SentencePieceTokenizer, train_sentencepiece
from gptlite.tokenizers.tiktoken import TiktokenTokenizer

WORDS = ["the", "quick", "brown", "fox", "naïve", "漢字かな", "12345", "don't", "x", "lazy", "jumps", "=", "😀"]
GAPS = [" ", " ", " ", "\n", "\n", "\n\n", "\n\n\n", "\n  ", "\n\t", " \n", "\r\n", "  ", "    "]


def text_of(size: int, gaps: list[str] = GAPS) -> str:
    rng = random.Random(0)
    return "".join(rng.choice(WORDS) + rng.choice(gaps) for _ in range(size))


def sentence_piece(**options: object) -> Tokenizer:
    """A model with SentencePiece's defaults: nmt_nfkc, a space before a text, no double spaces."""
    model = io.BytesIO()
    lines = text_of(4000).splitlines()
    kept = {"vocab_size": 400, "hard_vocab_limit": False, "byte_fallback": True, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **kept)
    return SentencePieceTokenizer(model.getvalue())


def ranks(pattern: str) -> Tokenizer:
    """Pairs of white space, which patterns decide to join or not."""
    pairs = [b"\n\n", b"  ", b" \n", b"\n ", b"\r\n", b"\n\n\n", b"th", b"the", b" t", b" the"]
    pieces = [*(bytes([byte]) for byte in range(256)), *pairs]
    return TiktokenTokenizer({each: n for n, each in enumerate(pieces)}, pattern, {"<|endoftext|>": len(pieces)})


def metaspace(folder: Path) -> Tokenizer:
    """A tokenizer.json as of Llama 2: a space before a text, and byte fallback."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thequickbrownfx"]
    made = rust.Tokenizer(
        rust.models.BPE({each: n for n, each in enumerate(dict.fromkeys(vocabulary))}, [], byte_fallback=True)
    )
    made.normalizer = rust.normalizers.Sequence([rust.normalizers.Prepend("▁"), rust.normalizers.Replace(" ", "▁")])
    made.decoder = rust.decoders.Sequence([rust.decoders.ByteFallback(), rust.decoders.Fuse()])
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return find_tokenizer(str(folder))


MAKE = {
    "byte": lambda _: ByteTokenizer(),
    "gptlite": lambda _: train_sentencepiece(text_of(4000).splitlines(), 400, lambda _: None),
    "gptlite, line ends in pieces": lambda _: train_sentencepiece([text_of(4000)], 400, lambda _: None),
    "sentencepiece": lambda _: sentence_piece(),
    "sentencepiece bpe": lambda _: sentence_piece(model_type="bpe"),
    "sentencepiece, identity": lambda _: sentence_piece(
        normalization_rule_name="identity", remove_extra_whitespaces=False
    ),
    "gpt2": lambda _: ranks(GPT2),
    "llama3": lambda _: ranks(LLAMA_3),
    "o200k": lambda _: ranks(O200K),
    "llama2": metaspace,
}


@pytest.fixture(scope="module", params=MAKE)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return MAKE[request.param](tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("gaps", [GAPS, [" "], ["\n\n"], [""]], ids=["mixed", "one line", "paragraphs", "no gaps"])
def test_parts_have_the_tokens_of_the_whole(tokenizer: Tokenizer, monkeypatch, gaps: list[str]) -> None:
    monkeypatch.setattr(cuts, "PART", 6000)
    text = text_of(6000, gaps)
    lines = text.splitlines(keepends=True)
    found = list(encoded(tokenizer, lines))
    assert np.array_equal(np.concatenate([ids for ids, _ in found]), tokenizer.encode_array(text))
    assert sum(size for _, size in found) == len(text.encode())
    if len(lines) > 1:  # a text that comes in one piece is not cut
        assert len(found) >= 3
        assert {ids.dtype for ids, _ in found} == {np.dtype(np.int32)}


@pytest.mark.parametrize("gaps", [GAPS, [" "]], ids=["mixed", "one line"])
def test_a_long_document_has_the_tokens_of_the_whole(tokenizer: Tokenizer, tmp_path, monkeypatch, gaps) -> None:
    """As preprocess reads it: one document in a text file, in parts that workers encode."""
    monkeypatch.setattr(blocks, "_PART", 9000)
    text = text_of(6000, gaps)
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    tokenizer.save(tmp_path / "tokenizer")
    cutting = blocks.Cutting()
    encode = Encoder(tmp_path / "tokenizer", ["text"], cutting, 0.0)
    sources = find_sources(str(tmp_path / "long.txt"), "auto")
    parts = [encode(each).part for each in blocks.read_blocks(sources, cutting, InputPlace(), tokenizer) if each.part]
    assert len(parts) >= 3
    assert np.array_equal(np.concatenate([part.tokens for part in parts]), tokenizer.encode_array(text))
    assert sum(part.text_bytes for part in parts) == len(text.encode())


class _Whole(ByteTokenizer):
    """No cut keeps its tokens: each depends on the length of the text."""

    def encode_array(self, text: str) -> np.ndarray:
        return (super().encode_array(text) + len(text)) % 251


def test_a_text_without_a_place_for_a_cut_is_encoded_as_a_whole(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuts, "PART", 6000)
    text = text_of(3000)
    assert last_cut(_Whole(), text.encode(), 6000) == 0
    ((ids, size),) = encoded(_Whole(), text.splitlines(keepends=True))
    assert (size, np.array_equal(ids, _Whole().encode_array(text))) == (len(text.encode()), True)


def test_a_document_that_cannot_be_cut_within_its_limit_is_left_out_by_name(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blocks, "_PART", 6000)
    (tmp_path / "long.txt").write_text(text_of(9000))
    sources = find_sources(str(tmp_path / "long.txt"), "auto")
    found = list(blocks.read_blocks(sources, blocks.Cutting(max_record_bytes=20000), InputPlace(), _Whole()))
    assert [piece.damage for block in found for piece in block.pieces] == [
        "it cannot be cut within max_record_bytes=20000 without a change of its tokens"
    ]
