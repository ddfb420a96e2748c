"""Hugging Face tokenizers: a tokenizer.json, read by the `tokenizers` library."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from gptlite import limits
from gptlite.data.tokenizer import UNKNOWN, Tokenizer, reading
from gptlite.documents import Between, DocumentError, parse_json, read_bytes, read_json
from gptlite.errors import ConfigError, needed_package

FILE = "tokenizer.json"
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<|im_end|>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Decoder(TypedDict):
    type: str
    decoders: NotRequired[list["_Decoder"]]


class _Model(TypedDict):
    unk_token: NotRequired[str | None]


class _Definition(TypedDict):
    """Content of a tokenizer.json that the library does not show."""

    decoder: NotRequired[_Decoder | None]
    model: NotRequired[_Model]


class _Token(TypedDict):
    content: str


class _Configuration(TypedDict):
    """Content of a tokenizer_config.json."""

    eos_token: NotRequired[str | _Token | None]


@dataclass
class _Settings:
    eod: Annotated[int, Between(0, limits.VOCABULARY)]


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json whose tokens are byte strings: byte-level BPE, or SentencePiece with byte fallback.

    Special tokens have no bytes. Text that spells one out is plain text and never becomes an end-of-document token.
    Nothing is added before or after a text. `eod` is the id that ends documents. Raises ConfigError for a file with
    any other type of decoder.
    """

    kind = "huggingface"
    file = FILE
    saved = _Settings

    def __init__(self, content: bytes, eod: int):
        self._tokenizer = _read(content)
        self._tokenizer.encode_special_tokens = True  # text that spells out a special token is plain text
        super().__init__(_pieces(self._tokenizer, _definition(content)), eod, {"eod": eod}, content)

    def definition(self) -> bytes:
        # The content takes megabytes, so only its digest is included.
        return self.eod.to_bytes(4, "little") + hashlib.sha256(self._content).digest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @classmethod
    def of_file(cls, path: Path, eod: str | None) -> "HuggingFaceTokenizer":
        """Load a tokenizer.json; `eod` is the text of the token that ends documents.

        The default is the eos_token in tokenizer_config.json beside `path`, else the first of `ENDS` in the vocabulary.
        Raises ConfigError if there is no such token.
        """
        content = read_bytes(path, limits.TOKENIZER_BYTES)
        vocabulary = _read(content).get_vocab(with_added_tokens=True)
        names = [eod] if eod is not None else [*_configured_end(path.with_name("tokenizer_config.json")), *ENDS]
        known = next((name for name in names if name in vocabulary), None)
        if known is None:
            raise ConfigError(
                f"tokenizer={path} has no token {' or '.join(names)} to end documents with; give eod=TOKEN"
            )
        return cls(content, vocabulary[known])


def byte_alphabet() -> dict[str, int]:
    """Return {character: byte} of GPT-2's byte-level BPE.

    Printable bytes stand for themselves. The other bytes get the characters from U+0100 on, in order.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = sorted(set(range(256)) - seen)
    return {chr(byte): byte for byte in seen} | {chr(0x100 + n): byte for n, byte in enumerate(unseen)}


def _read(content: bytes) -> Any:
    with needed_package("tokenizers", "a tokenizer.json"):
        from tokenizers import Tokenizer as Rust
    with reading(FILE):
        return Rust.from_buffer(content)


def _definition(content: bytes) -> _Definition:
    try:
        return parse_json(content, _Definition)
    except DocumentError as error:
        raise ConfigError(f"{FILE} cannot be read: {error}") from None


def _pieces(tokenizer: Any, definition: _Definition) -> list[bytes]:
    decoders = set(_types(definition.get("decoder")))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if max(vocabulary.values(), default=0) >= limits.VOCABULARY:
        raise ConfigError(
            f"{FILE} has the id {max(vocabulary.values())}; at most {limits.VOCABULARY:,} ids are supported"
        )
    added = tokenizer.get_added_tokens_decoder()
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, number in vocabulary.items():
        if number in added:
            pieces[number] = b"" if added[number].special else added[number].content.encode()
        elif "ByteLevel" in decoders:
            pieces[number] = _from_alphabet(token)
        elif decoders & {"ByteFallback", "Metaspace"}:
            byte = _BYTE.fullmatch(token)
            pieces[number] = bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
        else:
            found = ", ".join(sorted(decoders)) or "none"
            raise ConfigError(f"{FILE}: its decoder is {found}; supported are ByteLevel, ByteFallback and Metaspace")
    unknown = vocabulary.get(definition.get("model", {}).get("unk_token"))
    if unknown is not None:
        pieces[unknown] = UNKNOWN.encode()
    return pieces


_ALPHABET = byte_alphabet()


def _from_alphabet(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        raise ConfigError(f"{FILE}: token {token!r} has characters outside the alphabet of byte-level BPE") from None


def _types(decoder: _Decoder | None) -> Iterator[str]:
    if decoder:
        yield decoder["type"]
        for inner in decoder.get("decoders", ()):
            yield from _types(inner)


def _configured_end(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        end = read_json(path, _Configuration).get("eos_token")
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error
    name = end["content"] if isinstance(end, dict) else end
    return [name] if name else []
