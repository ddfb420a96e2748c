"""Reads every byte: verify PATH ... [vocab_size=N]

Of each dataset: that every sequence of .idx begins where the one before ended and documents are in order; that all
ids are in the vocabulary; that every document ends with the end of document; that .bin has the sha256 it was written
with; that the tokenizer beside it is the one that made it; and that the datasets of a folder have one dtype. Megatron's
own files have no .meta.json: of these the index, and the ids if vocab_size is given or a tokenizer/ is there. Exit code
1 if one is damaged.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from gptlite.data.indexed import IndexedDataset
from gptlite.data.verify import verify
from gptlite.data_tool.places import all_prefixes, tokenizer_beside
from gptlite.errors import ConfigError
from gptlite.metrics.console import format_bytes
from gptlite.progress import log


@dataclass
class Options:
    """What may follow the paths."""

    vocab_size: int | None = None


def run(paths: list[str], options: Options) -> int:
    """Prints a line for each dataset. Returns 1 if one is damaged."""
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
            raise ConfigError(f"{prefix}.bin holds {dataset.dtype} and {other}.bin {dtype}; write both anew")
    except ConfigError as error:
        print(f"DAMAGED  {error}", flush=True)
        return False
    seconds, size = time.monotonic() - began, dataset.tokens.nbytes
    unknown = "" if dataset.meta else ", no .meta.json: " + ("no hash" if vocab_size else "neither hash nor vocabulary")
    print(
        f"ok       {prefix}  {dataset.num_documents:,} documents, {len(dataset.tokens):,} tokens, "
        f"{format_bytes(size)} read in {seconds:.1f} s{unknown}",
        flush=True,
    )
    return True


def _tokenizer(dataset: IndexedDataset, vocab_size: int | None) -> int | None:
    """The size of the vocabulary, from the tokenizer where there is one. ConfigError if it is not the one of .meta."""
    tokenizer, meta = tokenizer_beside(dataset.prefix), dataset.meta
    if tokenizer is None:
        return vocab_size
    theirs = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod)
    if meta is not None and (meta.tokenizer, meta.vocab_size, meta.eod) != theirs:
        raise ConfigError(
            f"{dataset.prefix}.bin is of the tokenizer {meta.tokenizer[:12]}, vocabulary {meta.vocab_size}; the one in "
            f"tokenizer/ is {tokenizer.fingerprint[:12]}, {tokenizer.vocab_size}; write the folder anew"
        )
    return tokenizer.vocab_size
