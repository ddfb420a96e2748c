"""Tokenize a corpus into a folder that training reads.

gptlite preprocess input='corpus/*.jsonl.zst' tokenizer=FOLDER output=data/mine [workers=8]
    [format=auto] [field=text] [separator=] [validation_fraction=0.005] [on_error=error] [overwrite=false]
    [eod=TOKEN] [max_record_bytes=134217728]

input      files, folders or globs, separated by commas, or - (standard input) with format=jsonl|text. They contain
           JSON lines, Parquet or text, plain or compressed (gz, zst, xz, bz2)
tokenizer  byte, an output of gptlite train-tokenizer, a SentencePiece .model, a tokenizer.json or a folder with it,
           a .tiktoken file, or tiktoken:gpt2
field      the JSON field or Parquet column with the text
separator  separator of documents in text: nothing (a file is one document), blank (empty lines), or a string, e.g.
           '<|endoftext|>' or '\\n'

Each document ends with the tokenizer's end-of-document token. A fraction `validation_fraction` of documents, selected
by a hash of the text, is held out. A bad record is reported with its file and line and stops the command; with
on_error=skip it is left out and listed in skipped.jsonl. After a stop or kill, the same command continues where it
ended. The output does not depend on workers.
Exit codes: 0 done, 1 failed, 2 refused, 130/143 stopped.
"""

import errno
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError, is_of_a_file, printable
from gptlite.progress import counted, format_count, log

# Errors that persist until another output is given or the permissions of its folder are changed.
CANNOT_GO_ON = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT}
FEW_DOCUMENTS = 10  # with fewer, no fraction makes it likely that both splits have one


@dataclass
class Arguments:
    """Command-line arguments."""

    input: str = "???"
    tokenizer: str = "???"
    output: str = "???"
    workers: int | None = None  # null: one per available core
    format: str = "auto"
    field: str = "text"
    separator: str = ""
    validation_fraction: float = 0.005
    on_error: str = "error"
    overwrite: bool = False
    eod: str | None = None
    max_record_bytes: int = 128 << 20


def main() -> NoReturn:
    """Run the command line and exit."""
    run_tool(prepare, Arguments, __doc__)


def prepare(arguments: Arguments) -> int:
    """Prepare the folder and return the exit code."""
    from gptlite.cpu import cpu_cores
    from gptlite.satellites.preprocess.pool import WorkerDied
    from gptlite.satellites.preprocess.run import preprocess
    from gptlite.satellites.preprocess.settings import make_settings
    from gptlite.tokenizers.find import find_tokenizer

    signal.signal(signal.SIGTERM, stop)  # SystemExit runs the cleanup; the default action would not
    settings = make_settings(arguments)
    tokenizer = find_tokenizer(arguments.tokenizer, arguments.eod)
    if tokenizer.changes:
        log(f"tokenizer: it changes texts before it encodes them ({tokenizer.changes})")
    output, workers = Path(arguments.output).expanduser(), arguments.workers
    try:
        done = preprocess(
            replace(settings, tokenizer=tokenizer.fingerprint),
            tokenizer,
            output,
            workers=cpu_cores() if workers is None else workers,
            on_error=arguments.on_error,
            overwrite=arguments.overwrite,
            log=log,
        )
    except OSError as error:
        if not is_of_a_file(error):
            raise
        where = str(error.filename or output.with_name(f"{output.name}.partial"))
        reason = f"{where}: {(error.strerror or str(error)).lower()}"
        if error.errno in CANNOT_GO_ON and where.startswith(str(output)):
            raise ConfigError(f"output={arguments.output} cannot be written ({reason}); give another output=") from None
        print(printable(f"error: {reason}; fix the problem, and run the same command to continue"), file=sys.stderr)
        return 1
    except WorkerDied as error:
        print(printable(f"error: {error}; run the same command to continue"), file=sys.stderr)
        return 1
    counts, rate = done.counts, done.new.tokens / max(done.seconds, 1e-9)
    documents = counted(counts.documents, "document")
    print(f"{output}: {documents}, {counts.tokens:,} tokens of {counts.text_bytes:,} bytes of text")
    print(f"left out: {counted(counts.skipped, 'bad record')}, {counted(counts.empty, 'empty document')}")
    fraction = f"validation_fraction={arguments.validation_fraction}"
    print(f"split: {counted(done.split[0], 'training document')}, {done.split[1]:,} for validation ({fraction})")
    if arguments.validation_fraction and not all(done.split):
        print(f"warning: {split_advice(*done.split, {source.format for source in settings.sources})}")
    speed = f" in {done.seconds:.1f} s: {format_count(rate)} tokens/s" if done.new.tokens else ""
    print(f"{done.new.tokens:,} tokens written{speed}")
    return 0


def split_advice(train: int, held_out: int, formats: set[str]) -> str:
    """Return what to do about a corpus that has no document for one of the splits."""
    needs = "training needs text for validation" if train else "all documents are held out, and none is for training"
    if (number := train + held_out) >= FEW_DOCUMENTS:
        fraction = min(0.5, 5 / number)  # five documents on average
        return f"{needs}: run the command again with validation_fraction={fraction:.1g} overwrite=true"
    text = "text" in formats
    cut = ", e.g. with separator=blank, which makes one of each paragraph of a text" if text else ""
    instead = (
        ", or train on the text itself, data=text data.path=..., which holds out the end of each file" if text else ""
    )
    return (
        f"{needs}, and a whole document is in one split: give {FEW_DOCUMENTS} documents or more{cut}, and run the "
        f"command again with validation_fraction=0.5 overwrite=true{instead}"
    )


def stop(signum: int, _: FrameType | None) -> None:
    """Exit with code 128 + `signum`."""
    raise SystemExit(128 + signum)
