"""Settings of text, and of corpora with a recipe."""

from dataclasses import dataclass, field

from gptlite.data.config import DataConfig


@dataclass
class TextConfig(DataConfig):
    """Text file, or folder of *.txt files, tokenized on first use into `cache_dir`.

    `tokenizer` is sentencepiece (trained on the text), char or byte. `vocab_size` applies to sentencepiece.
    `validation_fraction` of the text is held out, from the end of every file.
    """

    path: str = "???"
    tokenizer: str = "sentencepiece"
    vocab_size: int = 4096
    validation_fraction: float = 0.1


@dataclass
class CorpusConfig(DataConfig):
    """Corpus with a recipe, data/<corpus>/prepare.py, which runs on first use and writes into `cache_dir`.

    `arguments` are specific to the recipe, such as `{max_documents: 1000}`. Arguments that are null are not passed.
    """

    corpus: str = "???"
    tokenizer: str = "sentencepiece"
    vocab_size: int = 4096
    path: str | None = None  # local copy of the raw source; null: download it
    arguments: dict[str, str | None] = field(default_factory=dict)
