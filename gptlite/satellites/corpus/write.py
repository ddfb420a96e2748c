"""Writing of prepared folders, which hold the data of a run: tokenizer/, train.bin/.idx, val.bin/.idx."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

from gptlite.data.folder import TRAIN, VALIDATION
from gptlite.progress import Log, Progress
from gptlite.satellites.corpus.check import check_tokenizer
from gptlite.satellites.corpus.cuts import encoded
from gptlite.satellites.corpus.indexed import IndexedWriter
from gptlite.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer
from gptlite.tokenizers.sentence_piece import train_sentencepiece

SAMPLE = 32 << 20  # characters to train SentencePiece on; this takes seconds, and more text hardly changes the pieces
_DIGEST = 8  # bytes of the hash of a document

Document = Iterable[str]  # the text of a document, in pieces that end at line ends; may be iterated repeatedly


def train_tokenizer(
    kind: str, vocab_size: int, training: Sequence[Document], held_out: Sequence[Document], log: Log
) -> Tokenizer:
    """Train a tokenizer for a corpus. SentencePiece is trained on the training documents only.

    The alphabet of `char` comes from all documents, as is usual; otherwise a character that is only in held-out text
    would have no id. Raises ConfigError for an unknown `kind` or an invalid `vocab_size`.
    """
    check_tokenizer(kind, vocab_size, section="")  # a run has already checked data.tokenizer
    match kind:
        case "byte":
            return ByteTokenizer()
        case "char":
            return CharTokenizer(chain.from_iterable(chain.from_iterable(chain(training, held_out))))
        case _:
            size = sum(map(len, chain.from_iterable(training)))
            every = -(-size // SAMPLE)
            used = f"one megabyte in {every} of {size / 1e6:.1f} MB" if every > 1 else f"{size / 1e6:.1f} MB of text"
            log(f"tokenizer: training SentencePiece with {vocab_size} pieces on {used}")
            # Evenly spread blocks, since the start of a corpus may differ from the rest.
            blocks = islice(chain.from_iterable(training), 0, None, every or 1)
            lines = (line for block in blocks for line in block.split("\n"))
            return train_sentencepiece(lines, vocab_size, log)


def limited(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield the first texts that together have at least `size` characters."""
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


def document_hash(data: bytes | memoryview = b"") -> "hashlib.blake2b":
    """Return a hash object that has hashed `data`, the start of a document. Its `update` adds the rest."""
    return hashlib.blake2b(data, digest_size=_DIGEST)


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Return True if the document with this hash is in the held-out `fraction`. Equal documents get the same result."""
    return int.from_bytes(digest, "big") < fraction * 2.0 ** (8 * _DIGEST)


@contextmanager
def split_writers(
    folder: Path, tokenizer: Tokenizer, work: Path | None = None
) -> Iterator[tuple[IndexedWriter, IndexedWriter]]:
    """Yield the writers of the training and the validation split of a prepared folder.

    With `work`, a folder for their state, the writers can resume after the process is killed.
    """
    about = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod)
    notes = [work and work / f"{split}.lengths" for split in (TRAIN, VALIDATION)]
    with (
        IndexedWriter(folder / TRAIN, *about, notes[0]) as train,
        IndexedWriter(folder / VALIDATION, *about, notes[1]) as held_out,
    ):
        yield train, held_out


def write_split(prefix: Path, documents: Iterable[Document], tokenizer: Tokenizer, progress: Progress) -> None:
    """Write tokenized documents, each followed by `eod`, to PREFIX.bin, .idx, .meta.json. `progress` counts bytes."""
    with IndexedWriter(prefix, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod) as writer:
        for document in documents:
            for ids, num_bytes in encoded(tokenizer, document):
                writer.write(ids, num_bytes)
                progress.add(num_bytes)
            writer.end_document()
