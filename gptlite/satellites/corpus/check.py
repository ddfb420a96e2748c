"""Checks of the settings of text and corpora before anything is written. Imports neither torch nor numpy."""

from pathlib import Path

from gptlite.errors import ConfigError, did_you_mean
from gptlite.limits import VOCABULARY
from gptlite.satellites.corpus.config import CorpusConfig, TextConfig
from gptlite.satellites.corpus.recipes import find_recipe
from gptlite.satellites.corpus.text import refuse_records

TOKENIZERS = ("sentencepiece", "char", "byte")


def check_text(config: TextConfig) -> None:
    """Raise ConfigError for an invalid tokenizer or fraction, and for a file that is not text. No text is read."""
    check_tokenizer(config.tokenizer, config.vocab_size)
    refuse_records(config.path)
    if not 0 < config.validation_fraction < 1:
        value = config.validation_fraction
        raise ConfigError(f"data.validation_fraction={value} must be above 0 and below 1, e.g. 0.1")


def check_corpus(config: CorpusConfig) -> None:
    """Raise ConfigError for an invalid tokenizer, a corpus without a recipe, or a source that does not exist."""
    check_tokenizer(config.tokenizer, config.vocab_size)
    find_recipe(config.corpus)
    if config.path is not None and not Path(config.path).expanduser().exists():
        raise ConfigError(f"data.path={config.path} does not exist; give the corpus's source, or null to download it")


def check_tokenizer(kind: str, vocab_size: int, section: str = "data.") -> None:
    """Raise ConfigError for an unknown tokenizer, or a SentencePiece vocabulary size below 1.

    `section` is the prefix of the keys in the message; "" for a recipe's arguments.
    """
    if kind not in TOKENIZERS:
        raise ConfigError(f"{section}tokenizer={kind} is not {' or '.join(TOKENIZERS)}{did_you_mean(kind, TOKENIZERS)}")
    if kind == "sentencepiece" and vocab_size < 1:
        raise ConfigError(f"{section}vocab_size={vocab_size} must be at least 1; 4096 suits a few megabytes of text")
    if vocab_size > VOCABULARY:
        raise ConfigError(f"{section}vocab_size={vocab_size} must be at most {VOCABULARY:,}")
