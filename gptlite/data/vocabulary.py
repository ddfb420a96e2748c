"""Vocabulary size of a run before its data is read, for plans and for checks before the ranks start."""

from pathlib import Path

from gptlite.data.config import DataConfig, SyntheticConfig, TokensConfig
from gptlite.data.indexed import Meta
from gptlite.data.registry import Vocabulary, find_kind
from gptlite.documents import read_json
from gptlite.progress import Log

GPT2_VOCABULARY = 50257


def find_vocabulary(config: DataConfig, log: Log = print) -> Vocabulary:
    """Return the vocabulary size of the data, or a guess if its tokenizer is not known yet. Never raises."""
    match config:
        case SyntheticConfig():
            return Vocabulary(config.vocab_size)
        case TokensConfig():
            folder = config.path or next(iter(config.blend or {}), None)
            known = folder and vocabulary_of_folder(Path(folder).expanduser())
            why = f"{folder}/train.meta.json has no vocab_size" if folder else "data.path is not set"
            return known or Vocabulary(GPT2_VOCABULARY, f"GPT-2's size; {why}")
        case _:
            kind = find_kind(config)
            if kind is not None and kind.vocabulary is not None:
                return kind.vocabulary(config, log)
            return Vocabulary(GPT2_VOCABULARY, "GPT-2's size; the data has no vocabulary")


def vocabulary_of_folder(folder: Path) -> Vocabulary | None:
    """Return the vocabulary of a prepared folder from its train.meta.json; None if that cannot be read."""
    try:
        return Vocabulary(read_json(folder / "train.meta.json", Meta).vocab_size)
    except (OSError, ValueError):
        return None
