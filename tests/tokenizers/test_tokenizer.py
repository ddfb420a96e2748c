"""Tokenizers lose nothing, and count the bytes they stand for."""

import io
import random

import numpy as np
import pytest

from gptlite.errors import ConfigError
from gptlite.tokenizers.base import ByteTokenizer, CharTokenizer, NumberTokenizer, StreamDecoder
from gptlite.tokenizers.huggingface import HuggingFaceTokenizer
from gptlite.tokenizers.sentence_piece import SentencePieceTokenizer, train_sentencepiece
from gptlite.tokenizers.sentence_piece_words import SPACE
from gptlite.tokenizers.tiktoken import TiktokenTokenizer

TEXTS = [
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\n",
    "emoji 😀👩‍👩‍👧 and 漢字かな\ttabs\t\there  double   triple spaces ",
    " leading\r\nwindows\r\n\n\n\n 1234567 \x00 \x7f \ufeff é e\u0301",
    "<s></s><unk><0x0A> ▅ ﬁ Å",
    "\n",
    "",
]
TRAINING = "\n".join(TEXTS[:1] * 20 + ["the quick brown fox\tjumps over 13 lazy dogs, again and again"] * 20)


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "sentencepiece": train_sentencepiece(TRAINING.split("\n"), 320, print),
        "char": CharTokenizer(set("".join(TEXTS))),
        "byte": ByteTokenizer(),
    }


def test_stream_gives_a_character_when_its_last_byte_is_there():
    stream = StreamDecoder(ByteTokenizer())
    assert [stream.push(byte) for byte in "a😀".encode()] == ["a", "", "", "", "😀"]
    assert [stream.push(byte) for byte in "漢".encode()[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"


def test_fingerprints_tell_tokenizers_apart(tokenizers):
    others = [CharTokenizer("abc"), CharTokenizer("abd"), NumberTokenizer(5), NumberTokenizer(6)]
    assert len({t.fingerprint for t in [*tokenizers.values(), *others]}) == 7
    assert CharTokenizer("cba").fingerprint == CharTokenizer("abc").fingerprint


def test_sentencepiece_agrees_with_its_own_encoder_and_decoder(tokenizers, monkeypatch):
    """Words are encoded alone and remembered; wherever the text is cut, and when what was remembered is forgotten."""
    tokenizer = tokenizers["sentencepiece"]
    assert tokenizer._words is not None
    rng = random.Random(0)
    alphabet = [*"the quick fox\t \n", "  ", "\n ", " \n", SPACE, "\u00a0", "\r\n", "\x00", *"é漢😀1", "<s>"]
    texts = [*TEXTS, TRAINING, *("".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(2000))]
    for chunk, cached in ((1 << 16, 64 << 20), (1, 64 << 20), (7, 3000), (100, 0)):
        monkeypatch.setattr("gptlite.tokenizers.sentence_piece_words._CHUNK", chunk)
        monkeypatch.setattr("gptlite.tokenizers.sentence_piece_words._CACHED", cached)
        for text in texts:
            ids = tokenizer.processor.encode(text)
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == tokenizer.processor.decode(ids) == text.replace(SPACE, " ")


def test_a_text_without_a_place_to_cut_is_cut_all_the_same_and_loses_nothing(tokenizers, monkeypatch):
    monkeypatch.setattr("gptlite.tokenizers.sentence_piece_words._CHUNK", 10)
    monkeypatch.setattr("gptlite.tokenizers.sentence_piece_words._LONGEST", 20)
    text = "thequickbrownfox" * 20
    assert tokenizers["sentencepiece"].decode(tokenizers["sentencepiece"].encode(text)) == text


@pytest.mark.parametrize(
    ("options", "by_words"),
    [
        ({}, True),
        ({"model_type": "unigram"}, False),
        ({"byte_fallback": False}, False),
        ({"add_dummy_prefix": True}, False),
        ({"remove_extra_whitespaces": True}, False),
        ({"normalization_rule_name": "nmt_nfkc"}, False),
        ({"treat_whitespace_as_suffix": True}, False),
        ({"split_by_whitespace": False}, False),
        ({"user_defined_symbols": ["a b"]}, False),
        ({"user_defined_symbols": ["x\n"]}, False),
        ({"user_defined_symbols": ["ab"]}, True),
    ],
)
def test_other_models_of_sentencepiece_are_encoded_by_words_only_where_that_is_the_same(options, by_words):
    import sentencepiece

    model = io.BytesIO()
    kept = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    }
    lines = ["the quick brown fox of the quick brown fox"] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=320 if "byte_fallback" not in options else 60,
        hard_vocab_limit=False,
        minloglevel=2,
        **kept | options,
    )
    tokenizer = SentencePieceTokenizer(model.getvalue())
    assert (tokenizer._words is not None) == by_words
    for text in (*TEXTS, *lines, "x\nab a b", "a b\n\n c"):
        assert tokenizer.encode(text) == tokenizer.processor.encode(text)


def test_sentencepiece_learns_from_lines_of_any_length():
    """Its trainer skips lines above a limit without a word."""
    tokenizer = train_sentencepiece(["wombat " * 2000], 300, print)
    assert len(tokenizer.encode("wombat wombat")) <= 4


def test_sentencepiece_gives_a_small_text_what_it_has():
    said = []
    tokenizer = train_sentencepiece(["hello world"], 4096, said.append)
    assert tokenizer.vocab_size < 4096
    assert said == [f"tokenizer: the text yields only {tokenizer.vocab_size} pieces, fewer than data.vocab_size=4096"]


def test_sentencepiece_without_room_for_the_bytes_says_how_many_it_needs():
    with pytest.raises(ConfigError, match=r"data.vocab_size=100 is too small .* give at least (\d+)") as error:
        train_sentencepiece(["hello world"], 100, print)
    least = int(str(error.value).split()[-1])
    assert train_sentencepiece(["hello world"], least, print).vocab_size == least
    with pytest.raises(ConfigError, match=r"could not be trained with data.vocab_size=400: .*sentences_.empty"):
        train_sentencepiece([""], 400, print)


def test_a_character_outside_the_alphabet_is_the_unknown_one():
    tokenizer = CharTokenizer("ab")
    assert tokenizer.encode("aéb") == [0, tokenizer.unknown, 1]
    assert tokenizer.decode(tokenizer.encode("aéb")) == "a\ufffdb"


def test_numbers_encode_to_their_value_modulo_the_vocabulary():
    tokenizer = NumberTokenizer(50)
    assert tokenizer.decode([3, 0, 49, 7]) == "3 0 7 "
    assert tokenizer.encode("3, 60") == [3, 10]
    assert (tokenizer.encode("\n"), tokenizer.prompt("\n"), tokenizer.prompt("5")) == ([], [49], [5])
    assert np.array_equal(tokenizer.token_bytes()[[3, 10, 49]], [2, 3, 0])


class Broken:
    """Encoder in Rust whose code panics."""

    class PanicException(BaseException):
        """As pyo3 has it."""

    def encode_ordinary(self, text: str) -> list[int]:
        raise Broken.PanicException("range end index\n2 out of range")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.encode_ordinary(text)


def test_an_encoder_that_panics_ends_in_a_line() -> None:
    huggingface, tiktoken = object.__new__(HuggingFaceTokenizer), object.__new__(TiktokenTokenizer)
    huggingface._tokenizer = tiktoken._encoding = Broken()
    for each in (huggingface, tiktoken):
        with pytest.raises(ConfigError, match="fails on a text: range end index 2 out of range"):
            each.encode("a")
