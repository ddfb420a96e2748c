"""Streaming recipes: tokenize a corpus on the Hugging Face hub into a prepared folder without a full download."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from gptlite.data.folder import TOKENIZER
from gptlite.errors import ConfigError, needed_package
from gptlite.progress import Progress, format_duration
from gptlite.satellites.corpus.check import TOKENIZERS
from gptlite.satellites.corpus.walk import files_below
from gptlite.satellites.corpus.write import SAMPLE, document_hash, is_held_out, limited, split_writers, train_tokenizer
from gptlite.tokenizers.base import Tokenizer
from gptlite.tokenizers.find import find_tokenizer

_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".gz": "json", ".zst": "json"}


@dataclass(frozen=True)
class Hub:
    """Location of a corpus on the Hugging Face hub, and the column with its text."""

    corpus: str
    repository: str
    column: str = "text"
    config: str | None = None


@dataclass
class StreamArguments:
    """Command-line arguments of a streaming recipe."""

    output: str = "???"
    tokenizer: str = "sentencepiece"
    vocab_size: int = 32000
    path: str | None = None  # a folder of .parquet or .jsonl files to read instead of the hub
    sample: str | None = None  # configuration of the repository to read, e.g. a sample
    max_documents: int | None = None
    validation_fraction: float = 0.0005


def prepare_stream(hub: Hub, arguments: StreamArguments) -> None:
    """Write the prepared folder `output`. With `output=-`, print the documents as JSON lines for gptlite preprocess.

    Raises ConfigError if the corpus is not available, lacks the column, or has no text.
    """
    if arguments.max_documents is not None and arguments.max_documents < 1:
        raise ConfigError(f"max_documents={arguments.max_documents} must be at least 1")
    if not 0 < arguments.validation_fraction < 1:
        raise ConfigError(f"validation_fraction={arguments.validation_fraction} must be above 0 and below 1")
    rows = open_rows(hub, arguments.path, arguments.sample or hub.config)
    source = f"data.path={arguments.path}" if arguments.path else hub.repository

    def documents() -> Iterable[str]:
        return islice(texts(rows, hub.column, source), arguments.max_documents)

    if arguments.output == "-":
        for text in documents():
            sys.stdout.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        return
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(documents(), arguments)
    write_stream(documents(), output, tokenizer, arguments)


_say = partial(print, flush=True)


def open_rows(hub: Hub, path: str | None, config: str | None) -> Iterable[dict[str, Any]]:
    """Stream the rows of the hub's configuration `config`, or of the files in the folder `path`.

    Raises ConfigError if they cannot be opened.
    """
    with needed_package("'gptlite[hub]'", f"data.corpus={hub.corpus}"):
        from datasets import load_dataset
    try:
        if path is None:
            return load_dataset(hub.repository, config, split="train", streaming=True)
        kind, files = _local(path)
        return load_dataset(kind, data_files=files, split="train", streaming=True)
    except ConfigError:
        raise
    except Exception as error:  # from the library, the network or a file system
        where = f"{hub.repository}, configuration {config}," if path is None else f"data.path={path}"
        raise ConfigError(
            f"data.corpus={hub.corpus}: {where} cannot be opened ({_reason(error)}); "
            "give data.path=, a folder with its .parquet or .jsonl files"
        ) from error


def _local(path: str) -> tuple[str, list[str]]:
    folder = Path(path).expanduser()
    known = files_below(folder, "data.path", _FORMATS) if folder.is_dir() else [folder]
    kinds = {_FORMATS[end] for file in known if (end := file.suffix.lower()) in _FORMATS}
    if len(kinds) != 1:
        what = "both .parquet and .jsonl" if kinds else "no .parquet or .jsonl files"
        raise ConfigError(f"data.path={path} holds {what}; give a folder with one of the two")
    return kinds.pop(), [str(file) for file in known]


def texts(rows: Iterable[dict[str, Any]], column: str, source: str) -> Iterator[str]:
    """Yield the non-empty texts in `column`. Raises ConfigError, naming `source` and the row, for an invalid row."""
    number = -1
    try:
        for number, row in enumerate(rows):
            if column not in row:
                raise ConfigError(f"{source}: row {number} has no column {column}; it has {', '.join(row)}")
            if (text := row[column]) is not None and not isinstance(text, str):
                raise ConfigError(f"{source}: column {column} of row {number} is {type(text).__name__}, not text")
            if text:
                yield text
    except ConfigError:
        raise
    except Exception as error:  # from the library, the network or a file system
        raise ConfigError(f"{source}: row {number + 1} cannot be read ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _tokenizer(documents: Iterable[str], arguments: StreamArguments) -> Tokenizer:
    """Return the given tokenizer, or train one on the start of the stream, leaving out held-out documents."""
    kind, fraction = arguments.tokenizer, arguments.validation_fraction
    if kind not in TOKENIZERS:
        return find_tokenizer(kind)
    if kind == "byte":
        return train_tokenizer(kind, arguments.vocab_size, [], [], _say)
    hashed = ((text, document_hash(text.encode("utf-8", errors="replace")).digest()) for text in documents)
    training = (text for text, digest in hashed if not is_held_out(digest, fraction))
    return train_tokenizer(kind, arguments.vocab_size, [[text] for text in limited(training, SAMPLE)], [], _say)


def write_stream(documents: Iterable[str], output: Path, tokenizer: Tokenizer, arguments: StreamArguments) -> None:
    """Tokenize documents into the folder `output` in one pass. Raises ConfigError if a split gets no documents."""
    progress, began = Progress("tokenizing", 0, _say), time.monotonic()
    with split_writers(output, tokenizer) as writers:
        for number, text in enumerate(documents, start=1):
            data = text.encode("utf-8", errors="replace")  # JSON allows lone surrogates, UTF-8 does not
            split = is_held_out(document_hash(data).digest(), arguments.validation_fraction)
            writers[split].write(tokenizer.encode(data.decode()), len(data))
            writers[split].end_document()
            seconds = max(time.monotonic() - began, 1e-9)
            left = "" if arguments.max_documents is None else _eta(seconds, number, arguments.max_documents)
            progress.add(0, f"{number:,} documents, {number / seconds:,.0f}/s{left}")
        counts = [each.num_documents for each in writers]
        if not all(counts):
            raise ConfigError(
                f"a split has no documents: {counts[0]} for training, {counts[1]} held out; "
                "raise max_documents, or change validation_fraction"
            )
    tokenizer.save(output / TOKENIZER)
    _say(f"documents: {counts[0]:,} for training, {counts[1]:,} held out")


def _eta(seconds: float, done: int, expected: int) -> str:
    return f" of at most {expected:,}, ETA {format_duration(seconds * max(expected - done, 0) / done)}"
