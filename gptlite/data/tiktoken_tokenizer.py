"""tiktoken encodings: byte-level BPE defined by a table of ranks."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from gptlite.data.tokenizer import Tokenizer
from gptlite.errors import ConfigError, needed_package

END = "<|endoftext|>"


class TiktokenTokenizer(Tokenizer):
    """Tokenizer of a tiktoken encoding. Special tokens have no bytes, and text that spells one out is plain text.

    `ranks` maps byte strings to ids and contains all 256 single bytes. `pattern` is the regular expression that splits
    text into words. `special` maps special tokens to ids and contains `eod`, the token that ends documents.
    """

    kind = "tiktoken"
    file = "ranks.tiktoken"

    def __init__(self, ranks: dict[bytes, int], pattern: str, special: dict[str, int], eod: str = END):
        if eod not in special:
            raise ConfigError(f"no special token {eod}; the special tokens are {', '.join(special) or 'none'}")
        self._encoding = _tiktoken().Encoding("gptlite", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
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
        return self._encoding.encode_ordinary(text)  # treats special tokens in a text as plain text

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> "TiktokenTokenizer":
        return cls(_read_ranks(folder / cls.file), **settings)

    @classmethod
    def of_name(cls, name: str, eod: str | None) -> "TiktokenTokenizer":
        """Load an encoding by name, e.g. gpt2. tiktoken downloads its ranks unless TIKTOKEN_CACHE_DIR has them.

        Raises ConfigError for an unknown name or a failed download.
        """
        tiktoken = _tiktoken()
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise ConfigError(f"tokenizer=tiktoken:{name} is not one of tiktoken's: {', '.join(sorted(known))}")
        try:
            encoding = tiktoken.get_encoding(name)
        except Exception as error:  # the errors of tiktoken's HTTP library
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


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line:
            try:
                piece, token = line.split()
                ranks[base64.b64decode(piece, validate=True)] = int(token)
            except ValueError:
                raise ConfigError(f"{path}:{number} is not a base64 string and its id") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        what = f"byte 0x{missing[0]:02x} has no id" if missing else "an id is repeated or negative"
        raise ConfigError(f"{path} is not a table of ranks: {what}")
    return ranks


def _tiktoken() -> Any:
    with needed_package("tiktoken", "a tiktoken encoding"):
        import tiktoken
    return tiktoken
