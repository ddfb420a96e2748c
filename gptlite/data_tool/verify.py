"""Verify every byte of datasets: verify PATH ... [vocab_size=N]

Checks that every sequence of .idx begins where the previous one ended, that documents are in order, that all ids are in
the vocabulary, that every document ends with the EOD token, that .bin has its original sha256, that it was written with
the tokenizer beside it, and that the datasets of a folder share one dtype. Files written by Megatron have no
.meta.json: only their index is checked, and their ids if vocab_size or a tokenizer/ is given. Exit code 1 if a dataset
is damaged.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from gptlite.data.indexed import IndexedDataset
from gptlite.data.verify import verify
from gptlite.data_tool.places import all_prefixes, tokenizer_beside
from gptlite.errors import ConfigError
from gptlite.metrics.console import format_bytes
from gptlite.progress import counted, log


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
    print(
        f"ok       {prefix}  {counted(dataset.num_documents, 'document')}, {len(dataset.tokens):,} tokens, "
        f"{format_bytes(size)} read in {seconds:.1f} s{unknown}",
        flush=True,
    )
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
