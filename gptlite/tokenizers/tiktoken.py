"""tiktoken encodings: byte-level BPE defined by a table of ranks."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from gptlite import limits
from gptlite.documents import Between, read_bytes, read_json
from gptlite.errors import ConfigError, needed_package
from gptlite.files import open_regular
from gptlite.tokenizers.base import Tokenizer, reading
from gptlite.tokenizers.rank_tables import END, GPT2, TABLES

_BEGIN = ("<|begin_of_text|>", "<s>")
_MISTRAL = ("<unk>", "<s>", "</s>")  # the first special tokens of a tekken.json that does not name its own


@dataclass
class _Settings:
    pattern: str
    special: dict[str, Annotated[int, Between(0, limits.VOCABULARY)]]
    eod: str


class _TekkenConfig(TypedDict):
    pattern: str
    default_vocab_size: Annotated[int, Between(1, limits.VOCABULARY)]
    default_num_special_tokens: Annotated[int, Between(0, limits.SPECIAL_TOKENS)]


class _TekkenToken(TypedDict):
    rank: Annotated[int, Between(0, limits.VOCABULARY)]
    token_bytes: str


class _TekkenSpecial(TypedDict):
    rank: Annotated[int, Between(0, limits.VOCABULARY)]
    token_str: str


class _Tekken(TypedDict):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: NotRequired[list[_TekkenSpecial] | None]


class TiktokenTokenizer(Tokenizer):
    """Tokenizer of a tiktoken encoding. Special tokens have no bytes, and text that spells one out is plain text.

    `ranks` maps byte strings to ids and contains all 256 single bytes. `pattern` is the regular expression that splits
    text into words. `special` maps special tokens to ids and contains `eod`, the token that ends documents.
    """

    kind = "tiktoken"
    file = "ranks.tiktoken"
    keeps_bytes = True
    saved = _Settings

    def __init__(self, ranks: dict[bytes, int], pattern: str, special: dict[str, int], eod: str = END):
        if eod not in special:
            named = [name for name in special if "reserved" not in name and "SPECIAL" not in name]
            raise ConfigError(f"no special token {eod}; the special tokens are {', '.join(named) or 'none'}")
        self.ranks, self.pattern, self.special = ranks, pattern, special
        make = partial(_tiktoken().Encoding, "gptlite", pat_str=pattern)
        with reading("the tiktoken encoding"):
            self._encoding = make(mergeable_ranks=ranks, special_tokens=special)
        pieces = [b""] * (max([*ranks.values(), *special.values()]) + 1)
        for piece, token in ranks.items():
            pieces[token] = piece
        rows = sorted(ranks.items(), key=lambda row: row[1])
        table = b"".join(base64.b64encode(piece) + b" %d\n" % token for piece, token in rows)
        super().__init__(pieces, special[eod], {"pattern": pattern, "special": special, "eod": eod}, table)
        self.bos = next((special[name] for name in _BEGIN if name in special), None)

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
        """Load a file of ranks, a base64 string and its id per line, e.g. a *.tiktoken file, Llama's tokenizer.model.

        A published table gets its pattern and special tokens (`rank_tables.TABLES`); another one GPT-2's pattern, and
        `eod` the next id. Raises ConfigError for another table in a file that does not end in .tiktoken.
        """
        ranks = _read_ranks(path)
        if (known := TABLES.get(len(ranks))) is not None:
            return cls(ranks, known.pattern, known.special({*ranks.values()}), eod or known.eod)
        if path.suffix != ".tiktoken":
            raise ConfigError(
                f"{path} has {len(ranks):,} ranks, where Llama 3 has 128,000 and Llama 4 200,000, so its pattern is "
                "unknown; give the model's tokenizer.json, or rename it to .tiktoken if it has GPT-2's pattern"
            )
        return cls(ranks, GPT2, {eod or END: max(ranks.values()) + 1}, eod or END)

    @classmethod
    def of_tekken(cls, path: Path, eod: str | None) -> "TiktokenTokenizer":
        """Load Mistral's tekken.json. The ids of special tokens come first, those of the ranks follow."""
        found = read_json(path, _Tekken, limits.TOKENIZER_BYTES)
        config, named = found["config"], {each["rank"]: each["token_str"] for each in found.get("special_tokens") or []}
        count = config["default_num_special_tokens"]
        rows = [row for row in found["vocab"] if row["rank"] < config["default_vocab_size"] - count]
        names = named or dict(enumerate(_MISTRAL))
        special = {names.get(n, f"<SPECIAL_{n}>"): n for n in range(count)}
        ranks = _checked([(row["token_bytes"].encode(), row["rank"] + count) for row in rows], path)
        if len(special) != count or min(ranks.values()) != count or max(ranks.values()) != count + len(ranks) - 1:
            raise ConfigError(f"{path} is damaged: its ranks are not 0 to {len(ranks) - 1:,}, or special tokens repeat")
        return cls(ranks, config["pattern"], special, eod or _MISTRAL[-1])


def is_ranks(path: Path) -> bool:
    """Return True if the first line of a file is a base64 string and an id, as in a table of ranks."""
    with open_regular(path) as file:
        words = file.readline(200).split()
    return len(words) == 2 and words[1].isdigit() and re.fullmatch(rb"[A-Za-z0-9+/]+=*", words[0]) is not None


def is_tekken(path: Path) -> bool:
    """Return True if a JSON file is Mistral's tekken.json, whatever its name."""
    with open_regular(path) as file:
        return b'"default_num_special_tokens"' in file.read(4096) or "tekken" in path.name


def _read_ranks(path: Path) -> dict[bytes, int]:
    return _checked((line.split() for line in read_bytes(path, limits.TOKENIZER_BYTES).splitlines()), path)


def _checked(rows: Iterable[Sequence[Any]], path: Path) -> dict[bytes, int]:
    """Return the ids by byte string of rows that are a base64 string and an id, or empty."""
    ranks: dict[bytes, int] = {}
    for number, row in enumerate(rows, 1):
        if row:
            try:
                piece, token = row
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
