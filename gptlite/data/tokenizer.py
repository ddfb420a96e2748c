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
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.errors import ConfigError

DEFINITION = "definition.json"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


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
        save_definition(folder, {"kind": self.kind})


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
        super().__init__([c.encode() for c in self.alphabet] + [UNKNOWN.encode(), b""], eod=self.unknown + 1)

    def definition(self) -> bytes:
        return self.alphabet.encode()

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(character, self.unknown) for character in text]

    def encode_array(self, text: str) -> np.ndarray:
        return np.fromiter(map(self._ids.get, text, repeat(self.unknown)), dtype=np.int32, count=len(text))

    def save(self, folder: Path) -> None:
        save_definition(folder, {"kind": self.kind, "alphabet": self.alphabet})


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
        save_definition(folder, {"kind": self.kind, "vocab_size": self.vocab_size})


def save_definition(folder: Path, definition: dict[str, Any]) -> None:
    """Write `folder`/definition.json, which `load_tokenizer` reads first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DEFINITION).write_text(json.dumps(definition, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`. Raises ConfigError where there is none, or one that cannot be read."""
    try:
        definition = json.loads((folder / DEFINITION).read_text(encoding="utf-8"))
        match definition["kind"]:
            case "byte":
                return ByteTokenizer()
            case "char":
                return CharTokenizer(definition["alphabet"])
            case "sentencepiece":
                from gptlite.data.sentence_piece import SentencePieceTokenizer  # which builds on this file

                return SentencePieceTokenizer.load(folder)
            case "huggingface":
                from gptlite.data.huggingface_tokenizer import HuggingFaceTokenizer

                return HuggingFaceTokenizer.load(folder, definition)
            case "tiktoken":
                from gptlite.data.tiktoken_tokenizer import TiktokenTokenizer

                return TiktokenTokenizer.load(folder, definition)
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
