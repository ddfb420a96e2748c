"""Full verification of a dataset, including checks that are too slow for every opening."""

import hashlib

import numpy as np

from gptlite.data.indexed import IndexedDataset, damaged, outside
from gptlite.progress import Log, Progress

_BLOCK = 8 << 20  # bytes of .bin, or entries of .idx, checked at a time


def verify(dataset: IndexedDataset, vocab_size: int | None = None, log: Log = print) -> None:
    """Check every byte: the index, ids within the vocabulary, `eod` after each document, and the SHA-256.

    Without a .meta.json only the index is checked, and the ids if `vocab_size` is given. Raises ConfigError naming the
    file, the position and the value found.
    """
    for start in range(0, max(len(dataset.lengths), dataset.num_documents), _BLOCK):
        dataset.check_index(start, start + _BLOCK)
    path, meta = dataset.bin, dataset.meta
    size = vocab_size if meta is None else meta.vocab_size
    progress = Progress(f"reading {path}", dataset.tokens.nbytes, log)
    digest = hashlib.sha256()
    step = _BLOCK // dataset.dtype.itemsize
    for start in range(0, len(dataset.tokens), step):
        block = dataset.tokens[start : start + step]
        digest.update(block.data)
        if size is not None and (place := outside(block, size)) is not None:
            raise damaged(path, f"token {start + place} is {block[place]}, outside the vocabulary of {size}")
        progress.add(block.nbytes)
    if meta is None:
        return
    _check_ends(dataset, meta.eod)
    if digest.hexdigest() != meta.sha256:
        raise damaged(path, f"its sha256 is {digest.hexdigest()}, not the {meta.sha256} it was written with")


def _check_ends(dataset: IndexedDataset, eod: int) -> None:
    before = 0
    for start in range(0, dataset.num_documents, _BLOCK):
        stops = dataset.document_stops(start, min(start + _BLOCK, dataset.num_documents))
        ended = np.diff(stops, prepend=before) > 0  # False for an empty document, which has no EOD token
        ended[ended] = dataset.tokens[stops[ended] - 1] == eod
        if not ended.all():
            words = f"document {start + int(ended.argmin())} does not end with the end-of-document token, {eod}"
            raise damaged(dataset.bin, words)
        before = int(stops[-1])
