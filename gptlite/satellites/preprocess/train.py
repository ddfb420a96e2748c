"""Training of a tokenizer for a corpus, from the same sources as preprocessing."""

from collections.abc import Iterator
from itertools import chain

from gptlite.errors import ConfigError, did_you_mean
from gptlite.progress import Log, Progress
from gptlite.satellites.corpus.write import document_hash, is_held_out, limited
from gptlite.satellites.preprocess.blocks import read_blocks
from gptlite.satellites.preprocess.encode import Bad, documents
from gptlite.satellites.preprocess.inputs import COMPRESSED
from gptlite.satellites.preprocess.pieces import InputPlace
from gptlite.satellites.preprocess.settings import PreprocessSettings
from gptlite.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer
from gptlite.tokenizers.sentence_piece import train_sentencepiece

KINDS = ("sentencepiece", "char")
_EXPANDS = 4  # assumed ratio of text to compressed bytes


def train_tokenizer(settings: PreprocessSettings, kind: str, vocab_size: int, sample_mb: int, log: Log) -> Tokenizer:
    """Train a tokenizer on the training split that preprocessing makes with the same settings.

    Bad records are left out. SentencePiece is trained on at most about `sample_mb` megabytes: evenly spread blocks of a
    larger corpus, or the first part of standard input. The alphabet of `char` comes from all documents; otherwise a
    character that occurs only in held-out text would have no id. Raises ConfigError for invalid arguments or if there
    is no text.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind={kind} is not one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    if vocab_size < 1 or sample_mb < 1:
        raise ConfigError(f"vocab_size={vocab_size}, sample_mb={sample_mb}: both must be at least 1")
    if kind == "char":
        tokenizer = CharTokenizer(chain.from_iterable(_texts(settings, 1, 0.0, log)))
        if not tokenizer.alphabet:
            raise ConfigError("input has no text to train on; give files with text")
        return tokenizer
    packed = any(source.format == "parquet" or source.path.endswith(tuple(COMPRESSED)) for source in settings.sources)
    size = sum(source.size for source in settings.sources) * (_EXPANDS if packed else 1)
    every = max(1, -(-size // (sample_mb << 20)))
    log(f"training SentencePiece with {vocab_size} pieces" + (f" on one megabyte in {every}" if every > 1 else ""))
    texts = limited(_texts(settings, every, settings.validation_fraction, log), sample_mb << 20)
    lines = (line for text in texts for line in text.split("\n"))
    first = next(lines, None)
    if first is None:
        raise ConfigError("input has no text to train on; give more text, or validation_fraction=0 to hold out nothing")
    return train_sentencepiece(chain([first], lines), vocab_size, log, key="vocab_size")


def _texts(settings: PreprocessSettings, every: int, held_out: float, log: Log) -> Iterator[str]:
    """Yield the documents of every `every`-th block, without the `held_out` fraction. Bad records are logged."""
    formats = [source.format for source in settings.sources]
    progress = Progress("reading", sum(source.size for source in settings.sources), log)
    before, bad = 0, list[Bad]()
    for number, block in enumerate(read_blocks(settings.sources, settings.cutting, InputPlace(), ByteTokenizer())):
        progress.add(block.read - before)
        before = block.read
        if number % every:
            continue
        for _, document in documents(block, formats, settings.cutting):
            if isinstance(document, Bad):
                bad.append(document)
            elif document.text:
                digest = document_hash(document.data).digest()
                if block.part is not None or not is_held_out(digest, held_out):
                    yield document.text
    if bad:
        where = f"{settings.sources[bad[0].source].path}:{bad[0].line}: {bad[0].reason}"
        log(f"left out {len(bad)} bad record{'s' if len(bad) > 1 else ''}, the first at {where}")
