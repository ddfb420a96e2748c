"""How many token ids a run's data has, before it is read: for plans, and for checks before a rank starts."""

import json
from dataclasses import dataclass
from pathlib import Path

from gptlite.data.config import CorpusConfig, DataConfig, SyntheticConfig, TextConfig, TokensConfig
from gptlite.data.tokenizer import ByteTokenizer
from gptlite.errors import ConfigError
from gptlite.progress import Log

GPT2_VOCABULARY = 50257
CHARACTERS = 256  # of a text nobody has read yet


@dataclass(frozen=True)
class Vocabulary:
    """`assumed`: why `size` is a guess; empty where the data says it."""

    size: int
    assumed: str = ""


def find_vocabulary(config: DataConfig, log: Log = print) -> Vocabulary:
    """What the data says of itself, prepared or not; a guess where its tokenizer is not known yet. Never raises."""
    match config:
        case SyntheticConfig():
            return Vocabulary(config.vocab_size)
        case TokensConfig():
            folder = config.path or next(iter(config.blend or {}), None)
            known = folder and _of_folder(Path(folder).expanduser())
            return known or Vocabulary(GPT2_VOCABULARY, f"GPT-2's; {folder}/train.meta.json does not say")
        case TextConfig() | CorpusConfig():
            return _unprepared(config) if config.tokenizer == "byte" else _prepared(config, log) or _unprepared(config)
        case _:
            return Vocabulary(GPT2_VOCABULARY, "GPT-2's; data names no source")


def _prepared(config: TextConfig | CorpusConfig, log: Log) -> Vocabulary | None:
    """Of the folder in the cache, if the data has been prepared."""
    from gptlite.data.build import prepared_folder  # torch comes with it

    try:
        return _of_folder(prepared_folder(config, log))
    except (ConfigError, OSError):  # the data is not on this machine, say: a plan needs none
        return None


def _unprepared(config: TextConfig | CorpusConfig) -> Vocabulary:
    if config.tokenizer == "byte":
        return Vocabulary(ByteTokenizer().vocab_size)
    if config.tokenizer == "char":
        return Vocabulary(CHARACTERS, "its characters, until the text has been read")
    return Vocabulary(config.vocab_size, "data.vocab_size, until the tokenizer has been trained")


def _of_folder(folder: Path) -> Vocabulary | None:
    """Of the tokens in a prepared folder, by their train.meta.json."""
    try:
        size = json.loads((folder / "train.meta.json").read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Vocabulary(size) if isinstance(size, int) and size > 0 else None
