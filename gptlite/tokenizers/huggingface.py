"""Hugging Face tokenizers: a tokenizer.json, read by the `tokenizers` library."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from gptlite import limits
from gptlite.documents import Between, DocumentError, parse_json, read_bytes, read_json
from gptlite.errors import ConfigError, needed_package
from gptlite.tokenizers.base import UNKNOWN, Tokenizer, reading

FILE = "tokenizer.json"
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<|im_end|>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Part(TypedDict):
    """Decoder or normalizer, which may be a sequence of others."""

    type: str
    decoders: NotRequired[list["_Part"]]
    normalizers: NotRequired[list["_Part"]]


class _Model(TypedDict, total=False):
    type: str
    unk_token: str | None
    byte_fallback: bool | None
    dropout: float | None


class _Added(TypedDict):
    id: int
    content: str
    special: bool


class _Definition(TypedDict, total=False):
    """Content of a tokenizer.json that gptlite reads itself."""

    truncation: dict[str, Any] | None
    padding: dict[str, Any] | None
    normalizer: _Part | None
    decoder: _Part | None
    model: Required[_Model]
    added_tokens: list[_Added]


class _Token(TypedDict):
    content: str


class _Configuration(TypedDict):
    """Content of a tokenizer_config.json."""

    eos_token: NotRequired[str | _Token | None]
    bos_token: NotRequired[str | _Token | None]


@dataclass
class _Settings:
    eod: Annotated[int, Between(0, limits.VOCABULARY)]


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json whose tokens are byte strings: byte-level BPE, or SentencePiece with byte fallback.

    Special tokens have no bytes. Text that spells one out is plain text and never becomes an end-of-document token.
    Nothing is added before or after a text, and nothing is cut: `truncation` and `padding`, which transformers saves
    with the file once they have been used, and the `dropout` of BPE are ignored. `eod` is the id that ends documents.
    Raises ConfigError for a file with any other type of decoder.
    """

    kind = "huggingface"
    file = FILE
    saved = _Settings

    def __init__(self, content: bytes, eod: int):
        definition = _definition(content)
        used = _with_special(_plain(definition), eod)
        self.used = content if used == definition else json.dumps(used, ensure_ascii=False).encode()
        self._tokenizer = _read(self.used)
        self._tokenizer.encode_special_tokens = True  # text that spells out a special token is plain text
        super().__init__(_pieces(self._tokenizer, definition, eod), eod, {"eod": eod}, content)
        self.changes = ", ".join(_types(definition.get("normalizer")))
        prefix = b'"add_prefix_space":true' in b"".join(content.split())
        self.keeps_bytes = "ByteLevel" in _types(definition.get("decoder")) and not self.changes and not prefix
        if state := _state(definition):
            self.warning = f"its {FILE} was saved with {' and '.join(state)}, by which documents may have been changed"

    def definition(self) -> bytes:
        # The content takes megabytes, so only its digest is included.
        return self.eod.to_bytes(4, "little") + hashlib.sha256(self._content).digest()

    def encode(self, text: str) -> list[int]:
        with reading(FILE, "fails on a text"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def name_of(self, token: int) -> str:
        """Return the text by which tokenizer.json names a token."""
        return str(self._tokenizer.id_to_token(token))

    @classmethod
    def of_file(cls, path: Path, eod: str | None) -> "HuggingFaceTokenizer":
        """Load a tokenizer.json; `eod` is the text of the token that ends documents.

        The default is the eos_token in tokenizer_config.json beside `path`, else the first of `ENDS` in the vocabulary.
        The tokenizer's content is without truncation, padding and dropout. Raises ConfigError if there is no such
        token, or if some text cannot be encoded without loss.
        """
        content = read_bytes(path, limits.TOKENIZER_BYTES)
        definition = _definition(content)
        if _state(definition):
            content = json.dumps(_plain(definition), ensure_ascii=False).encode()
        vocabulary = _read(content).get_vocab(with_added_tokens=True)
        names = [eod] if eod is not None else [*_configured(path, "eos_token"), *ENDS]
        known = next((name for name in names if name in vocabulary), None)
        if known is None:
            raise ConfigError(
                f"tokenizer={path} has no token {' or '.join(names)} to end documents with; give eod=TOKEN"
            )
        _refuse_lossy(vocabulary, definition)
        tokenizer = cls(content, vocabulary[known])
        tokenizer.bos = next((vocabulary.get(name) for name in _configured(path, "bos_token")), None)
        if tokenizer.eod in tokenizer.encode(known):
            raise ConfigError(
                f"tokenizer={path}: the text {known!r} is encoded as the token {known}, so a text could end a document"
                "; give eod=TOKEN with a special token"
            )
        return tokenizer


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


def _state(definition: _Definition) -> list[str]:
    """Return what a file was saved with that changes documents: truncation, padding, dropout."""
    found = [key for key in ("truncation", "padding") if definition.get(key) is not None]
    return found + (["dropout"] if definition["model"].get("dropout") else [])


def _plain(definition: _Definition) -> _Definition:
    """Return the definition without truncation, padding and dropout."""
    if not _state(definition):
        return definition
    model = {**definition["model"], "dropout": None}
    return {**definition, "truncation": None, "padding": None, "model": model}  # type: ignore[typeddict-item]


def _with_special(definition: _Definition, eod: int) -> _Definition:
    """Return the definition with the token that ends documents as a special one, or a text could spell it."""
    added = [{**each, "special": each["special"] or each["id"] == eod} for each in definition.get("added_tokens", [])]
    return {**definition, "added_tokens": added}  # type: ignore[typeddict-item]


def _refuse_lossy(vocabulary: Collection[str], definition: _Definition) -> None:
    """Raise ConfigError unless every byte has a token: of byte-level BPE, or of byte fallback that is turned on."""
    decoders, model = set(_types(definition.get("decoder"))), definition["model"]
    if "ByteLevel" in decoders:
        missing = [f"0x{byte:02X}" for character, byte in byte_alphabet().items() if character not in vocabulary]
    elif decoders & {"ByteFallback", "Metaspace"}:
        missing = [f"0x{byte:02X}" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
        if not missing and not model.get("byte_fallback"):
            raise ConfigError(
                f"{FILE} loses characters: it has tokens for all bytes, but its byte_fallback is off; turn it on"
            )
    else:
        return  # `_pieces` refuses it
    if missing:
        shown = ", ".join(sorted(missing)[:4]) + (", ..." if len(missing) > 4 else "")
        raise ConfigError(
            f"{FILE} loses characters: {len(missing)} of 256 bytes have no token ({shown}); use a tokenizer with byte "
            "fallback or the whole alphabet of byte-level BPE"
        )


def _pieces(tokenizer: Any, definition: _Definition, eod: int) -> list[bytes]:
    decoders = set(_types(definition.get("decoder")))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if max(vocabulary.values(), default=0) >= limits.VOCABULARY:
        raise ConfigError(
            f"{FILE} has the id {max(vocabulary.values())}; at most {limits.VOCABULARY:,} ids are supported"
        )
    added = tokenizer.get_added_tokens_decoder()
    pieces = [b""] * (max([*vocabulary.values(), eod]) + 1)
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
    unknown = vocabulary.get(definition["model"].get("unk_token"))
    if unknown is not None:
        pieces[unknown] = UNKNOWN.encode()
    pieces[eod] = b""
    return pieces


_ALPHABET = byte_alphabet()


def _from_alphabet(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        raise ConfigError(f"{FILE}: token {token!r} has characters outside the alphabet of byte-level BPE") from None


def _types(part: _Part | None) -> Iterator[str]:
    """Yield the types of a decoder or normalizer, and of those that it consists of."""
    if part:
        inner = [*part.get("decoders", ()), *part.get("normalizers", ())]
        yield from [part["type"]] if not inner else []
        for each in inner:
            yield from _types(each)


def _configured(path: Path, key: Literal["bos_token", "eos_token"]) -> list[str]:
    """Return the special token that the tokenizer_config.json beside a tokenizer.json names, if any."""
    path = path.with_name("tokenizer_config.json")
    if not path.is_file():
        return []
    try:
        end = read_json(path, _Configuration).get(key)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error
    name = end["content"] if isinstance(end, dict) else end
    return [name] if name else []
