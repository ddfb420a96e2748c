"""Tokenizers: text to ids and back, without loss.

Every tokenizer is a table of byte strings, one an id. Decoding joins them, streaming decodes them as they come, and
bits per byte adds up their lengths, so the three can never disagree.
"""

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.errors import ConfigError
from gptlite.files import write_synced

DEFINITION = "definition.json"
_CLASSES = {  # by kind, in the module that is loaded when it is asked for
    "byte": "tokenizer.ByteTokenizer",
    "char": "tokenizer.CharTokenizer",
    "numbers": "tokenizer.NumberTokenizer",
    "sentencepiece": "sentence_piece.SentencePieceTokenizer",
    "huggingface": "huggingface_tokenizer.HuggingFaceTokenizer",
    "tiktoken": "tiktoken_tokenizer.TiktokenTokenizer",
}
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(ABC):
    """Ids stand for byte strings (`pieces`); `eod` is the id that ends a document and stands for no bytes.

    Made again of `settings`, the keyword arguments of its class, and of `content`, the first argument of one that has
    a `file` beside the definition.
    """

    kind: str
    file = ""

    def __init__(self, pieces: list[bytes], eod: int, settings: dict[str, Any] | None = None, content: bytes = b""):
        self.pieces = pieces
        self.eod = eod
        self._settings, self._content = settings or {}, content

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

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as int32[N]: much less memory, and mostly faster."""
        return np.array(self.encode(text), dtype=np.int32)

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
        folder.mkdir(parents=True, exist_ok=True)
        definition = json.dumps({"kind": self.kind} | self._settings, ensure_ascii=False)
        (folder / DEFINITION).write_text(definition + "\n", encoding="utf-8")
        if self.file:
            write_synced(folder / self.file, self._content)

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> "Tokenizer":
        """What `save` wrote into `folder`, with the `settings` of its definition."""
        content = [(folder / cls.file).read_bytes()] if cls.file else []
        make: Any = cls  # each kind has arguments of its own
        return make(*content, **settings)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: ids 0-255, and 256 ends a document. Nothing to train."""

    kind = "byte"

    def __init__(self):
        super().__init__([bytes([value]) for value in range(256)] + [b""], eod=256)

    def definition(self) -> bytes:
        return b""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int32)


class CharTokenizer(Tokenizer):
    """One id a character, in code point order; then one for characters not in the alphabet, and `eod`."""

    kind = "char"

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
    """Ids written out as numbers, for tokens that never were text. The last id is `eod`."""

    kind = "numbers"

    def __init__(self, vocab_size: int):
        pieces = [f"{token} ".encode() for token in range(vocab_size - 1)] + [b""]
        super().__init__(pieces, vocab_size - 1, {"vocab_size": vocab_size})

    def definition(self) -> bytes:
        return str(self.vocab_size).encode()

    def encode(self, text: str) -> list[int]:
        """The numbers in `text`, modulo the vocabulary; [0] for a text without any."""
        return [int(number) % self.vocab_size for number in re.findall(r"[0-9]+", text)] or [0]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`. Raises ConfigError where there is none, or one that cannot be read."""
    try:
        definition = json.loads((folder / DEFINITION).read_text(encoding="utf-8"))
        if (kind := definition.pop("kind")) not in _CLASSES:
            raise ValueError(f"unknown kind {kind}")
        module, name = _CLASSES[kind].split(".")
        return getattr(import_module(f"gptlite.data.{module}"), name).load(folder, definition)
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
