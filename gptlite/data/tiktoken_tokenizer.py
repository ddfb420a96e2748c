"""tiktoken encodings: byte-level BPE defined by a table of ranks."""

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from gptlite import limits
from gptlite.data.tokenizer import Tokenizer, reading
from gptlite.documents import Between, read_bytes
from gptlite.errors import ConfigError, needed_package
from gptlite.files import open_regular

END = "<|endoftext|>"
# Pattern and special tokens of Llama 3, whose file has only the ranks. The 256 special tokens get the next ids.
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA_SPECIAL, LLAMA_END = 256, "<|end_of_text|>"
LLAMA_NAMES = {0: "<|begin_of_text|>", 1: LLAMA_END, 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}


@dataclass
class _Settings:
    pattern: str
    special: dict[str, Annotated[int, Between(0, limits.VOCABULARY)]]
    eod: str


class TiktokenTokenizer(Tokenizer):
    """Tokenizer of a tiktoken encoding. Special tokens have no bytes, and text that spells one out is plain text.

    `ranks` maps byte strings to ids and contains all 256 single bytes. `pattern` is the regular expression that splits
    text into words. `special` maps special tokens to ids and contains `eod`, the token that ends documents.
    """

    kind = "tiktoken"
    file = "ranks.tiktoken"
    saved = _Settings

    def __init__(self, ranks: dict[bytes, int], pattern: str, special: dict[str, int], eod: str = END):
        if eod not in special:
            raise ConfigError(f"no special token {eod}; the special tokens are {', '.join(special) or 'none'}")
        make = partial(_tiktoken().Encoding, "gptlite", pat_str=pattern)
        with reading("the tiktoken encoding"):
            self._encoding = make(mergeable_ranks=ranks, special_tokens=special)
        pieces = [b""] * (max([*ranks.values(), *special.values()]) + 1)
        for piece, token in ranks.items():
            pieces[token] = piece
        rows = sorted(ranks.items(), key=lambda row: row[1])
        table = b"".join(base64.b64encode(piece) + b" %d\n" % token for piece, token in rows)
        super().__init__(pieces, special[eod], {"pattern": pattern, "special": special, "eod": eod}, table)

    def definition(self) -> bytes:
        about = json.dumps(list(self._settings.values()), sort_keys=True)
        return about.encode() + hashlib.sha256(self._content).digest()

    def encode(self, text: str) -> list[int]:
        with reading("the tiktoken encoding", "fails on a text"):  # e.g. by a pattern that matches nothing
            return self._encoding.encode_ordinary(text)  # treats special tokens in a text as plain text

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> "TiktokenTokenizer":
        return cls(_read_ranks(folder / cls.file), **settings)

    @classmethod
    def of_name(cls, name: str, eod: str | None) -> "TiktokenTokenizer":
        """Load an encoding by name, e.g. gpt2. tiktoken downloads the ranks unless TIKTOKEN_CACHE_DIR has them.

        Raises ConfigError for an unknown name or a failed download.
        """
        tiktoken = _tiktoken()
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise ConfigError(f"tokenizer=tiktoken:{name} is not an encoding of tiktoken: {', '.join(sorted(known))}")
        try:
            encoding = tiktoken.get_encoding(name)
        except Exception as error:  # errors of tiktoken's HTTP library
            raise ConfigError(
                f"tokenizer=tiktoken:{name} could not be downloaded ({type(error).__name__}); "
                f"give the path of its .tiktoken file"
            ) from error
        return cls(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens, eod or END)

    @classmethod
    def of_file(cls, path: Path, eod: str | None) -> "TiktokenTokenizer":
        """Load a file of ranks (a base64 string and its id per line) with GPT-2's pattern. `eod` gets the next id."""
        _tiktoken()
        from tiktoken_ext.openai_public import r50k_pat_str

        ranks = _read_ranks(path)
        return cls(ranks, r50k_pat_str, {eod or END: max(ranks.values()) + 1}, eod or END)

    @classmethod
    def of_llama(cls, path: Path, eod: str | None) -> "TiktokenTokenizer":
        """Load Llama 3's tokenizer.model, with its pattern and special tokens. Unnamed special tokens are reserved."""
        ranks = _read_ranks(path)
        first = max(ranks.values()) + 1
        special = {LLAMA_NAMES.get(n, f"<|reserved_{n}|>"): first + n for n in range(LLAMA_SPECIAL)}
        return cls(ranks, LLAMA_PATTERN, special, eod or LLAMA_END)


def is_ranks(path: Path) -> bool:
    """Return True if the first line of a file is a base64 string and an id, as in a table of ranks."""
    with open_regular(path) as file:
        words = file.readline(200).split()
    return len(words) == 2 and words[1].isdigit() and re.fullmatch(rb"[A-Za-z0-9+/]+=*", words[0]) is not None


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, limits.TOKENIZER_BYTES).splitlines(), 1):
        if line:
            try:
                piece, token = line.split()
                ranks[base64.b64decode(piece, validate=True)] = int(token)
            except ValueError:
                raise ConfigError(f"{path}:{number} is not a base64 string and its id") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    ids = ranks.values()
    if missing:
        raise ConfigError(f"{path} is not a table of ranks: byte 0x{missing[0]:02x} has no id")
    if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= limits.VOCABULARY:
        raise ConfigError(
            f"{path} is not a table of ranks: an id is repeated, negative, or {limits.VOCABULARY:,} or more"
        )
    return ranks


def _tiktoken() -> Any:
    with needed_package("tiktoken", "a tiktoken encoding"):
        import tiktoken
    return tiktoken
