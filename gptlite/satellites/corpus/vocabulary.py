"""Vocabulary size of text or a corpus before it is read."""

from gptlite.data.registry import Vocabulary
from gptlite.data.vocabulary import vocabulary_of_folder
from gptlite.errors import ConfigError
from gptlite.progress import Log
from gptlite.satellites.corpus.config import CorpusConfig, TextConfig
from gptlite.tokenizers.base import ByteTokenizer

CHARACTERS = 256  # assumed for a text that has not been read yet


def text_vocabulary(config: TextConfig | CorpusConfig, log: Log) -> Vocabulary:
    """Return the vocabulary size of the data, or a guess if its tokenizer is not known yet. Never raises."""
    if config.tokenizer == "byte":
        return Vocabulary(ByteTokenizer().vocab_size)
    guess = Vocabulary(config.vocab_size, "data.vocab_size, until the tokenizer has been trained")
    if config.tokenizer == "char":
        guess = Vocabulary(CHARACTERS, "a guess, until the text has been read")
    return _prepared(config, log) or guess


def _prepared(config: TextConfig | CorpusConfig, log: Log) -> Vocabulary | None:
    """Return the vocabulary of the prepared folder in the cache, or None if the data is not prepared."""
    from gptlite.satellites.corpus.prepare import prepared_folder  # imports torch, so only here

    try:
        return vocabulary_of_folder(prepared_folder(config, log))
    except (ConfigError, OSError):  # the data may not be on this machine, and a plan does not need it
        return None
