"""Vocabulary size of a run before its data is read, for plans and for checks before the ranks start."""

from dataclasses import dataclass
from pathlib import Path

from gptlite.data.config import CorpusConfig, DataConfig, SyntheticConfig, TextConfig, TokensConfig
from gptlite.data.indexed import Meta
from gptlite.documents import read_json
from gptlite.errors import ConfigError
from gptlite.progress import Log
from gptlite.tokenizers.base import ByteTokenizer

GPT2_VOCABULARY = 50257
CHARACTERS = 256  # assumed for a text that has not been read yet


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary size. `assumed` explains a guessed `size`; it is empty if the size comes from the data."""

    size: int
    assumed: str = ""


def find_vocabulary(config: DataConfig, log: Log = print) -> Vocabulary:
    """Return the vocabulary size of the data, or a guess if its tokenizer is not known yet. Never raises."""
    match config:
        case SyntheticConfig():
            return Vocabulary(config.vocab_size)
        case TokensConfig():
            folder = config.path or next(iter(config.blend or {}), None)
            known = folder and _of_folder(Path(folder).expanduser())
            why = f"{folder}/train.meta.json has no vocab_size" if folder else "data.path is not set"
            return known or Vocabulary(GPT2_VOCABULARY, f"GPT-2's size; {why}")
        case TextConfig() | CorpusConfig() if config.tokenizer == "byte":
            return Vocabulary(ByteTokenizer().vocab_size)
        case TextConfig() | CorpusConfig():
            guess = Vocabulary(config.vocab_size, "data.vocab_size, until the tokenizer has been trained")
            if config.tokenizer == "char":
                guess = Vocabulary(CHARACTERS, "a guess, until the text has been read")
            return _prepared(config, log) or guess
        case _:
            return Vocabulary(GPT2_VOCABULARY, "GPT-2's size; the data has no vocabulary")


def _prepared(config: TextConfig | CorpusConfig, log: Log) -> Vocabulary | None:
    """Return the vocabulary of the prepared folder in the cache, or None if the data is not prepared."""
    from gptlite.data.build import prepared_folder  # imports torch, so only here

    try:
        return _of_folder(prepared_folder(config, log))
    except (ConfigError, OSError):  # the data may not be on this machine, and a plan does not need it
        return None


def _of_folder(folder: Path) -> Vocabulary | None:
    """Return the vocabulary of a prepared folder from its train.meta.json; None if that cannot be read."""
    try:
        return Vocabulary(read_json(folder / "train.meta.json", Meta).vocab_size)
    except (OSError, ValueError):
        return None
