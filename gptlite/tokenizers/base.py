"""Tokenizers: conversion between text and token ids.

Every tokenizer has a table of byte strings, one for each id. Decoding, streaming decoding and bits per byte all use
this table, so they agree.
"""

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from gptlite import limits
from gptlite.documents import Between, checked, read_bytes, read_json, shown
from gptlite.errors import ConfigError, text_of
from gptlite.files import write_synced

DEFINITION = "definition.json"
_CLASSES = {  # module and class by kind; the module is imported on demand
    "byte": "base.ByteTokenizer",
    "char": "base.CharTokenizer",
    "numbers": "base.NumberTokenizer",
    "sentencepiece": "sentence_piece.SentencePieceTokenizer",
    "huggingface": "huggingface.HuggingFaceTokenizer",
    "tiktoken": "tiktoken.TiktokenTokenizer",
}
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass
class NoSettings:
    """Settings of a tokenizer without any."""


class Tokenizer(ABC):
    """Base class of tokenizers. `pieces` are the ids' byte strings; that of `eod`, which ends a document, is empty.

    `bos` is the id that begins a text for the model that the tokenizer was made for, None without one. In documents of
    gptlite, `eod` alone separates texts. `begin` is the id before a text that a model has seen there: `eod`, and `bos`
    for imported weights.

    A saved tokenizer is rebuilt by calling its class with `settings` as keyword arguments. If the class stores a `file`
    beside the definition, the `content` of that file is the first positional argument.
    """

    kind: str
    file = ""
    saved: type = NoSettings  # dataclass of the saved settings
    changes = ""  # how a text is changed before it is encoded, e.g. `NFC`; empty if it is not
    keeps_bytes = False  # True if the pieces of a text's ids are always the text, byte for byte
    warning = ""  # what may be wrong with data that was prepared with this tokenizer

    def __init__(self, pieces: list[bytes], eod: int, settings: dict[str, Any] | None = None, content: bytes = b""):
        self.pieces = pieces
        self.eod = self.begin = eod
        self.bos: int | None = None
        self._settings, self._content = settings or {}, content

    @property
    def vocab_size(self) -> int:
        """Number of ids, including `eod`."""
        return len(self.pieces)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the kind and the definition. Tokenizers with equal fingerprints encode identically."""
        # The zero byte separates kind and definition, so that no other pair gives the same bytes.
        return hashlib.sha256(self.kind.encode() + b"\0" + self.definition()).hexdigest()

    @abstractmethod
    def definition(self) -> bytes:
        """Return bytes that identify this tokenizer among those of its kind."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without `eod`."""

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of `text` as int32[N], which takes much less memory than a list and is usually faster."""
        return np.array(self.encode(text), dtype=np.int32)

    def prompt(self, text: str) -> list[int]:
        """Return the ids of the start of a document, at least one, as a model needs: `begin` for a text without ids."""
        return self.encode(text) or [self.begin]

    @cached_property
    def adds_space(self) -> bool:
        """True if a text is encoded with a space before it, as in Llama 2. Decoding then removes one."""
        return self.decode(self.encode("x")).startswith(" ")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Ids outside the vocabulary are skipped; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.piece, ids)).decode("utf-8", errors="replace")

    def piece(self, token: int) -> bytes:
        """Return the bytes of one id; b"" for an id outside the vocabulary."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def token_bytes(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of each id's piece: int64[vocab_size]."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    @property
    def saved_bytes(self) -> list[int]:
        """Sizes of the files that `save` writes, in bytes."""
        return [len(self._json), *([len(self._content)] if self.file else [])]

    @property
    def _json(self) -> bytes:
        return json.dumps({"kind": self.kind} | self._settings, ensure_ascii=False).encode() + b"\n"

    def save(self, folder: Path) -> None:
        """Write the definition into `folder`, created if missing. `load_tokenizer` reads it back."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DEFINITION).write_bytes(self._json)
        if self.file:
            write_synced(folder / self.file, self._content)

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> "Tokenizer":
        """Return the tokenizer saved in `folder`, with the `settings` of its definition."""
        content = [read_bytes(folder / cls.file, limits.TOKENIZER_BYTES)] if cls.file else []
        make: Any = cls  # the arguments differ by kind
        return make(*content, **settings)


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes: ids 0-255, and 256 ends a document. Needs no training."""

    kind = "byte"
    keeps_bytes = True

    def __init__(self):
        super().__init__([bytes([value]) for value in range(256)] + [b""], eod=256)

    def definition(self) -> bytes:
        return b""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_array(self, text: str) -> np.ndarray:
        # converted in C, without a list
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int32)


@dataclass
class _Alphabet:
    alphabet: str


@dataclass
class _Numbers:
    vocab_size: Annotated[int, Between(1, limits.VOCABULARY)]


class CharTokenizer(Tokenizer):
    """Tokenizer of characters. Ids are in code point order, followed by one id for unknown characters and `eod`."""

    kind = "char"
    saved = _Alphabet

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        self.unknown = len(self.alphabet)
        self._ids = {character: token for token, character in enumerate(self.alphabet)}
        pieces = [character.encode() for character in self.alphabet] + [UNKNOWN.encode(), b""]
        super().__init__(pieces, self.unknown + 1, {"alphabet": self.alphabet})

    def definition(self) -> bytes:
        return self.alphabet.encode()

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(character, self.unknown) for character in text]

    def encode_array(self, text: str) -> np.ndarray:
        return np.fromiter(map(self._ids.get, text, repeat(self.unknown)), dtype=np.int32, count=len(text))


class NumberTokenizer(Tokenizer):
    """Tokenizer for synthetic tokens, which decodes ids to decimal numbers. The last id is `eod`."""

    kind = "numbers"
    saved = _Numbers

    def __init__(self, vocab_size: int):
        pieces = [f"{token} ".encode() for token in range(vocab_size - 1)] + [b""]
        super().__init__(pieces, vocab_size - 1, {"vocab_size": vocab_size})

    def definition(self) -> bytes:
        return str(self.vocab_size).encode()

    def encode(self, text: str) -> list[int]:
        """Return the numbers in `text`, of 18 digits at most, modulo the vocabulary size."""
        return [int(number[-18:]) % self.vocab_size for number in re.findall(r"[0-9]+", text)]


@contextmanager
def reading(what: str, fails: str = "cannot be read") -> Iterator[None]:
    """Context manager for a library's reader or encoder, whose errors become a ConfigError that names `what`.

    Libraries in Rust raise a BaseException if their code panics.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ConfigError):
        raise
    except BaseException as error:
        raise ConfigError(f"{what} {fails}: {' '.join(text_of(error).split()):.300}") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer saved in `folder`. Raises ConfigError if it is missing or cannot be read."""
    try:
        definition = read_json(folder / DEFINITION, dict[str, Any])
        if (kind := definition.pop("kind", None)) not in [*_CLASSES]:
            raise ValueError(f"{DEFINITION}: kind is {shown(kind)}, not {' or '.join(_CLASSES)}")
        module, name = _CLASSES[kind].split(".")
        made: type[Tokenizer] = getattr(import_module(f"gptlite.tokenizers.{module}"), name)
        return made.load(folder, vars(checked(definition, made.saved, DEFINITION)))
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} has no readable tokenizer: {error}; prepare the data again") from error


class StreamDecoder:
    """Incremental decoder of ids: returns a character once all of its bytes are present."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text completed by this id; "" while a character is incomplete."""
        return self._decoder.decode(self._tokenizer.piece(token))

    def flush(self) -> str:
        """Return the rest of the text: U+FFFD for an incomplete character, otherwise ""."""
        return self._decoder.decode(b"", final=True)
