"""Verify every byte of datasets: verify PATH ... [vocab_size=N]

Checks that every sequence of .idx begins where the previous one ended, that documents are in order, that all ids are in
the vocabulary, that every document ends with the EOD token, that .bin has its original sha256, that it was written with
the tokenizer beside it, and that the datasets of a folder share one dtype. Files written by Megatron have no
.meta.json: only their index is checked, and their ids if vocab_size or a tokenizer/ is given. Exit code 1 if a dataset
is damaged.
"""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptlite.data.indexed import IndexedDataset, damaged, outside
from gptlite.errors import ConfigError, printable
from gptlite.metrics.console import format_bytes
from gptlite.progress import Log, Progress, counted, log
from gptlite.satellites.data_tool.places import all_prefixes, tokenizer_beside

_BLOCK = 8 << 20  # bytes of .bin, or entries of .idx, checked at a time


@dataclass
class Options:
    """Command-line options."""

    vocab_size: int | None = None


def run(paths: list[str], options: Options) -> int:
    """Print a line for each dataset. Return 1 if any is damaged, otherwise 0."""
    dtypes: dict[Path, tuple[Path, str]] = {}
    results = [_verify(prefix, options.vocab_size, dtypes) for prefix in all_prefixes(paths)]
    if len(results) > 1:
        print(f"{results.count(True)} of {len(results)} intact")
    return 0 if all(results) else 1


def _verify(prefix: Path, vocab_size: int | None, dtypes: dict[Path, tuple[Path, str]]) -> bool:
    began = time.monotonic()
    try:
        dataset = IndexedDataset(prefix)
        vocab_size = _tokenizer(dataset, vocab_size)
        verify(dataset, vocab_size, log)
        other, dtype = dtypes.setdefault(prefix.parent, (prefix, str(dataset.dtype)))
        if dtype != dataset.dtype:
            raise ConfigError(f"{prefix}.bin has dtype {dataset.dtype}, but {other}.bin has {dtype}; write both again")
    except ConfigError as error:
        print(f"DAMAGED  {error}", flush=True)
        return False
    seconds, size = time.monotonic() - began, dataset.tokens.nbytes
    unknown = "" if dataset.meta else f", no .meta.json: {'hash' if vocab_size else 'hash and vocabulary'} not checked"
    line = (
        f"ok       {prefix}  {counted(dataset.num_documents, 'document')}, {len(dataset.tokens):,} tokens, "
        f"{format_bytes(size)} read in {seconds:.1f} s{unknown}"
    )
    print(printable(line), flush=True)
    tokenizer = tokenizer_beside(prefix)
    if tokenizer and tokenizer.warning:
        print(printable(f"warning  {prefix}: {tokenizer.warning}; prepare the data again"), flush=True)
    return True


def _tokenizer(dataset: IndexedDataset, vocab_size: int | None) -> int | None:
    """Return the vocabulary size of the tokenizer beside a dataset, or `vocab_size` if there is no tokenizer.

    Raises ConfigError if the tokenizer is not the one in .meta.json.
    """
    tokenizer, meta = tokenizer_beside(dataset.prefix), dataset.meta
    if tokenizer is None:
        return vocab_size
    theirs = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod)
    if meta is not None and (meta.tokenizer, meta.vocab_size, meta.eod) != theirs:
        raise ConfigError(
            f"{dataset.prefix}.bin was written with tokenizer {meta.tokenizer[:12]}, vocabulary {meta.vocab_size}, but "
            f"tokenizer/ has {tokenizer.fingerprint[:12]}, vocabulary {tokenizer.vocab_size}; write the folder again"
        )
    return tokenizer.vocab_size


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
