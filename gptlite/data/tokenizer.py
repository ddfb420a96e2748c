"""Tokenizers: text to ids and back, without loss.

Every tokenizer is a table of byte strings, one an id. Decoding joins them, streaming decodes them as they come, and
bits per byte adds up their lengths, so the three can never disagree.
"""

import codecs
import hashlib
import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from gptlite.data.progress import Log
from gptlite.errors import ConfigError

_DEFINITION = "definition.json"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_CHUNK = 1 << 16  # characters one thread encodes at a time


class Tokenizer(ABC):
    """Ids stand for byte strings (`pieces`); `eod` is the id that ends a document and stands for no bytes."""

    kind: str

    def __init__(self, pieces: list[bytes], eod: int):
        self.pieces = pieces
        self.eod = eod

    @property
    def vocab_size(self) -> int:
        """Number of ids, `eod` among them."""
        return len(self.pieces)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the definition: equal for tokenizers that encode alike."""
        return hashlib.sha256(self.kind.encode() + b"\0" + self.definition()).hexdigest()

    @abstractmethod
    def definition(self) -> bytes:
        """All that sets this tokenizer apart from others of its kind."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without `eod`."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of any ids: those outside the vocabulary are nothing, broken UTF-8 becomes U+FFFD. Never raises."""
        return b"".join(map(self.piece, ids)).decode("utf-8", errors="replace")

    def piece(self, token: int) -> bytes:
        """Bytes one id stands for; none for an id outside the vocabulary."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def token_bytes(self) -> np.ndarray:
        """int64[vocab_size]: UTF-8 bytes each id stands for, the denominator of bits per byte."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    def save(self, folder: Path) -> None:
        """Write the definition into `folder`, which is made if missing; `load_tokenizer` reads it back."""
        _save_definition(folder, {"kind": self.kind})


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: ids 0-255, and 256 ends a document. Nothing to train."""

    kind = "byte"

    def __init__(self):
        super().__init__([bytes([value]) for value in range(256)] + [b""], eod=256)

    def definition(self) -> bytes:
        return b""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))


class CharTokenizer(Tokenizer):
    """One id a character, in code point order; then one for characters not in the alphabet, and `eod`."""

    kind = "char"

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        self.unknown = len(self.alphabet)
        self._ids = {character: token for token, character in enumerate(self.alphabet)}
        super().__init__([c.encode() for c in self.alphabet] + [_UNKNOWN.encode(), b""], eod=self.unknown + 1)

    def definition(self) -> bytes:
        return self.alphabet.encode()

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(character, self.unknown) for character in text]

    def save(self, folder: Path) -> None:
        _save_definition(folder, {"kind": self.kind, "alphabet": self.alphabet})


class NumberTokenizer(Tokenizer):
    """Ids written out as numbers, for tokens that never were text. The last id is `eod`."""

    kind = "numbers"

    def __init__(self, vocab_size: int):
        super().__init__([f"{token} ".encode() for token in range(vocab_size - 1)] + [b""], eod=vocab_size - 1)

    def definition(self) -> bytes:
        return str(self.vocab_size).encode()

    def encode(self, text: str) -> list[int]:
        """The numbers in `text`, modulo the vocabulary; [0] for a text without any."""
        return [int(number) % self.vocab_size for number in re.findall(r"[0-9]+", text)] or [0]

    def save(self, folder: Path) -> None:
        _save_definition(folder, {"kind": self.kind, "vocab_size": self.vocab_size})


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with byte fallback (Kudo and Richardson 2018). `eod` is its end-of-sentence piece.

    SentencePiece writes a space as U+2581, so that one character reads back as a space.
    """

    kind = "sentencepiece"
    _model_file = "tokenizer.model"

    def __init__(self, model: bytes):
        processor = _sentencepiece().SentencePieceProcessor(model_proto=model)
        self.model = model
        self._processor = processor
        super().__init__([self._bytes_of(token) for token in range(processor.vocab_size())], eod=processor.eos_id())

    def _bytes_of(self, token: int) -> bytes:
        piece = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # "<0x0A>"
        if self._processor.is_control(token):
            return b""
        return (_UNKNOWN if self._processor.is_unknown(token) else piece.replace("\u2581", " ")).encode()

    def definition(self) -> bytes:
        return self.model

    def encode(self, text: str) -> list[int]:
        chunks = list(_line_chunks(text, _CHUNK))
        return list(chain.from_iterable(self._processor.encode(chunks, num_threads=_num_threads())))

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / self._model_file).write_bytes(self.model)

    @classmethod
    def load(cls, folder: Path) -> "SentencePieceTokenizer":
        """The model that `save` wrote into `folder`."""
        return cls((folder / cls._model_file).read_bytes())


def _save_definition(folder: Path, definition: dict[str, str | int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _DEFINITION).write_text(json.dumps(definition, ensure_ascii=False) + "\n", encoding="utf-8")


def _line_chunks(text: str, size: int) -> Iterator[str]:
    # No piece we train holds a newline, so ids do not depend on where between two lines the text is cut.
    start = 0
    while start < len(text):
        end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end


def _num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _sentencepiece():
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            "data.tokenizer=sentencepiece needs a missing package; pip install sentencepiece, or data.tokenizer=char"
        ) from None
    return sentencepiece


def train_sentencepiece(lines: Iterable[str], vocab_size: int, log: Log) -> SentencePieceTokenizer:
    """A byte-fallback BPE of at most `vocab_size` ids. A text too small for as many gets what it has, and is told.

    Raises ConfigError if `vocab_size` has no room for the 256 bytes and the characters of the text.
    """
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 30,  # longer lines would be skipped without a word
            num_threads=_num_threads(),
            minloglevel=2,
        )
    except RuntimeError as error:
        needed = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        fix = f"take at least {needed[1]}" if needed else " ".join(str(error).split())
        raise ConfigError(f"data.vocab_size={vocab_size} has no room for the text's characters; {fix}") from error
    tokenizer = SentencePieceTokenizer(model.getvalue())
    if tokenizer.vocab_size < vocab_size:
        log(f"tokenizer: the text has only {tokenizer.vocab_size} pieces, fewer than data.vocab_size={vocab_size}")
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`. Raises ConfigError where there is none, or one that cannot be read."""
    try:
        definition = json.loads((folder / _DEFINITION).read_text(encoding="utf-8"))
        match definition["kind"]:
            case "byte":
                return ByteTokenizer()
            case "char":
                return CharTokenizer(definition["alphabet"])
            case "sentencepiece":
                return SentencePieceTokenizer.load(folder)
            case "numbers":
                return NumberTokenizer(definition["vocab_size"])
            case kind:
                raise ValueError(f"unknown kind {kind}")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} holds no tokenizer of gptlite's: {error}; prepare the data again") from error


class StreamDecoder:
    """Text of ids that come one at a time: a character is given out once all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that has become certain with this id; "" inside a character."""
        return self._decoder.decode(self._tokenizer.piece(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else ""."""
        return self._decoder.decode(b"", final=True)
