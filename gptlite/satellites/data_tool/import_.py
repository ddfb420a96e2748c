"""Import token files: import PATH format=nanogpt|llmc|datatrove|megatron output=FOLDER tokenizer=SPEC [validation=PATH]

PATH is a file of tokens, a glob in quotes, or a folder with *train*.bin and *val*.bin; files are read in name order.
For format=megatron it is a PREFIX, or a folder with train.bin/.idx and val.bin/.idx; for format=datatrove, *.ds beside
their *.ds.index. format=nanogpt reads uint16 tokens without a header; dtype=uint8, uint32, int32 or int64 reads such
files of others, e.g. of OLMo-core. tokenizer is the one that produced
the tokens, given as for gptlite preprocess: a tokenizer folder, tokenizer.json, tiktoken:gpt2 or byte.

  gptlite data import nanoGPT/data/openwebtext format=nanogpt output=data/owt tokenizer=tiktoken:gpt2
  gptlite data import 'fineweb10B/fineweb_*.bin' format=llmc output=data/fineweb tokenizer=tiktoken:gpt2

validation=PATH is the validation split. Without it, and without *val* files, validation_fraction=0.005 of the documents
are held out, chosen by the hash of their tokens. eod=TOKEN is the token that ends documents, for a tokenizer that does
not define one. In the output, every document ends with that token. Empty documents are left out, missing EOD tokens are
added, and the numbers of both are printed. A token outside the vocabulary is an error, and nothing is written.
"""

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gptlite.data.folder import TOKENIZER, TRAIN, VALIDATION
from gptlite.data.indexed import IndexedDataset
from gptlite.errors import ConfigError, did_you_mean
from gptlite.files import new_folder, refuse_used
from gptlite.progress import Progress, counted, log
from gptlite.satellites.corpus.indexed import IndexedWriter
from gptlite.satellites.corpus.recognize import refuse_folder, refuse_suffix
from gptlite.satellites.corpus.write import document_hash, is_held_out, split_writers
from gptlite.satellites.data_tool.foreign import (
    RAW,
    Corrections,
    DocumentBatch,
    cut_at_ends,
    datatrove_documents,
    megatron_documents,
    open_datatrove,
    open_llmc,
    open_nanogpt,
)
from gptlite.satellites.data_tool.places import as_prefix
from gptlite.tokenizers.base import Tokenizer
from gptlite.tokenizers.find import find_tokenizer

FORMATS = ("nanogpt", "llmc", "datatrove", "megatron")
_ENDINGS = {"megatron": ".idx", "datatrove": ".ds"}
Documents = Callable[[Corrections], Iterator[DocumentBatch]]


@dataclass
class Options:
    """Command-line options."""

    format: str = "???"
    output: str = "???"
    tokenizer: str = "???"
    eod: str | None = None
    dtype: str | None = None
    validation: str | None = None
    validation_fraction: float = 0.005


def run(paths: list[str], options: Options) -> int:
    """Write the prepared folder and return the exit code. No output remains after an error."""
    if options.format not in FORMATS:
        hint = did_you_mean(options.format, FORMATS)
        raise ConfigError(f"format={options.format} is not one of {', '.join(FORMATS)}{hint}")
    if options.dtype is not None and (options.dtype not in RAW or options.format != "nanogpt"):
        words = f"is not one of {', '.join(RAW)}" if options.dtype not in RAW else "is for format=nanogpt only"
        raise ConfigError(f"dtype={options.dtype} {words}")
    if not 0 <= options.validation_fraction < 1:
        raise ConfigError(f"validation_fraction={options.validation_fraction} must be at least 0 and below 1")
    output = Path(options.output).expanduser()
    refuse_used("output", output)
    tokenizer = find_tokenizer(options.tokenizer, options.eod)
    train, validation = _sources(paths[0], options, tokenizer)
    with new_folder(output) as temporary:
        counts = _write(temporary, tokenizer, train, validation, options.validation_fraction)
        tokenizer.save(temporary / TOKENIZER)
    for split in (TRAIN, VALIDATION):
        dataset = IndexedDataset(output / split)
        print(f"{output / split}: {counted(dataset.num_documents, 'document')}, {len(dataset.tokens):,} tokens")
    if counts.empty:
        print(f"left out: {counted(counts.empty, 'empty document')}")
    if counts.unended:
        print(f"added the end-of-document token, {tokenizer.eod}, to {counted(counts.unended, 'document')}")
    return 0


def _sources(path: str, options: Options, tokenizer: Tokenizer) -> tuple[Documents, Documents | None]:
    """Return the training documents, and the held-out ones if they are in separate files."""
    validation, format = options.validation, options.format
    make = partial(_documents, format=format, dtype=options.dtype, tokenizer=tokenizer)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return make(_files(path, format)), None if validation is None else make(_files(validation, format))
    refuse_folder("import", folder)
    ending = _ENDINGS.get(format, ".bin")
    train = sorted(file for file in folder.glob(f"*train*{ending}") if not file.name.startswith("."))
    held_out = sorted(file for file in folder.glob(f"*val*{ending}") if not file.name.startswith("."))
    if not train and format == "datatrove":  # its own names have numbers only
        train = sorted(set(folder.glob("*.ds")) - set(held_out))
    if not train:
        raise ConfigError(f"{path} holds no *train*{ending}; give the files as a glob in quotes")
    if validation is not None:
        held_out = _files(validation, format)
    return make(train), make(held_out) if held_out else None


def _files(path: str, format: str) -> list[Path]:
    given = Path(path).expanduser()
    if format == "megatron":
        return [given]
    files = [given] if given.exists() else sorted(map(Path, glob.glob(str(given))))
    if not files:
        raise ConfigError(f"{path} does not exist; give a file of tokens, a glob in quotes, or a folder")
    return files


def _documents(files: list[Path], format: str, dtype: str | None, tokenizer: Tokenizer) -> Documents:
    """Open the files, which detects damage before anything is written. Return a function that yields the documents."""
    eod, size = tokenizer.eod, tokenizer.vocab_size
    if format == "megatron":
        datasets = [IndexedDataset(as_prefix(file)) for file in files]
        total = sum(dataset.tokens.nbytes for dataset in datasets)

        def of_megatron(found: Corrections) -> Iterator[DocumentBatch]:
            progress = Progress("importing", total, log)
            for dataset in datasets:
                yield from megatron_documents(dataset, eod, size, found, progress)

        return of_megatron
    if format == "datatrove":
        indexed = [(file, *open_datatrove(file)) for file in files]
        total = sum(tokens.nbytes for _, tokens, _ in indexed)

        def of_datatrove(found: Corrections) -> Iterator[DocumentBatch]:
            progress = Progress("importing", total, log)
            for file, tokens, ends in indexed:
                yield from datatrove_documents(file, tokens, ends, eod, size, found, progress)

        return of_datatrove
    for file in files if format == "nanogpt" and dtype is None else ():
        _refuse_other(file)
    opened = [(file, open_llmc(file) if format == "llmc" else open_nanogpt(file, dtype, size)) for file in files]
    total = sum(tokens.nbytes for _, tokens in opened)
    if not total:
        raise ConfigError(f"{files[0]} holds no tokens; give a file with tokens")
    before = format == "llmc"
    return lambda found: cut_at_ends(opened, eod, size, before, found, Progress("importing", total, log))


def _refuse_other(file: Path) -> None:
    """Raise ConfigError for a token file that is not nanoGPT's by its name."""
    if file.suffix in (".ds", ".npy"):
        refuse_suffix("format=nanogpt", file)
    if file.suffix == ".bin" and file.with_suffix(".idx").exists():
        raise ConfigError(f"format=nanogpt: {file} has an .idx beside it, as Megatron's files do; give format=megatron")
    refuse_folder("import", file.parent)


def _write(
    folder: Path, tokenizer: Tokenizer, train: Documents, validation: Documents | None, fraction: float
) -> Corrections:
    counts, token_bytes = Corrections(), tokenizer.token_bytes()

    def add(writer: IndexedWriter, tokens: np.ndarray, lengths: np.ndarray) -> None:
        writer.write_documents(tokens, lengths, int(token_bytes[tokens].sum()))

    with split_writers(folder, tokenizer) as writers:
        for batch in train(counts):
            chosen = np.zeros(len(batch.lengths), dtype=bool) if validation else held_out(batch, fraction)
            for writer, kept in zip(writers, (~chosen, chosen), strict=True):
                add(writer, batch.tokens[np.repeat(kept, batch.lengths)], batch.lengths[kept])
        for batch in validation(counts) if validation else ():
            add(writers[1], batch.tokens, batch.lengths)
        if fraction and not writers[1].num_documents:
            number = writers[0].num_documents
            raised = "raise it, or " if number > 1 else ""  # a document is in one split as a whole
            documents = counted(number, "document")
            raise ConfigError(
                f"validation_fraction={fraction} holds out none of {documents}; {raised}give validation=PATH"
            )
        if fraction and not writers[0].num_documents:
            raise ConfigError(
                f"validation_fraction={fraction} holds out all documents; lower it, or give validation=PATH"
            )
    return counts


def held_out(batch: DocumentBatch, fraction: float) -> np.ndarray:
    """Return a mask of the documents to hold out, about `fraction` of all: bool[D]. Equal documents share a split."""
    data, stops = memoryview(batch.tokens.astype("<i4").tobytes()), 4 * np.cumsum(batch.lengths)
    starts = stops - 4 * batch.lengths
    hashes = (document_hash(data[start:stop]).digest() for start, stop in zip(starts, stops, strict=True))
    return np.fromiter((is_held_out(each, fraction) for each in hashes), dtype=bool, count=len(stops))
