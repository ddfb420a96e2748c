"""Preprocessing of text sources into a prepared folder, which can be stopped and resumed."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from gptlite.data.folder import TOKENIZER, TRAIN, VALIDATION
from gptlite.data.indexed import IndexedDataset
from gptlite.errors import ConfigError, did_you_mean
from gptlite.files import sync_folder, sync_tree, try_lock, write_synced, write_whole
from gptlite.progress import Log, Progress, format_count
from gptlite.satellites.preprocess.blocks import InputBlock, read_blocks
from gptlite.satellites.preprocess.encode import Bad, Encoded, Encoder
from gptlite.satellites.preprocess.inputs import STDIN
from gptlite.satellites.preprocess.output import SKIPPED, STATE, WHOLE, Counts, Output
from gptlite.satellites.preprocess.pieces import InputPlace, Piece
from gptlite.satellites.preprocess.pool import Pool
from gptlite.satellites.preprocess.settings import FILE, PreprocessSettings, difference, read_settings
from gptlite.tokenizers.base import Tokenizer

SAVED_BYTES = 64 << 20  # input bytes between two saves; a kill loses at most the work on these
_SHOWN = 10  # bad records that are logged; all are in skipped.jsonl


@dataclass(frozen=True)
class PreprocessResult:
    """Totals of the prepared folder, totals (`new`) and seconds of this call, and number of documents per split."""

    counts: Counts
    new: Counts
    seconds: float
    split: tuple[int, int]


def preprocess(
    settings: PreprocessSettings,
    tokenizer: Tokenizer,
    output: Path,
    *,
    workers: int,
    on_error: str,
    overwrite: bool,
    log: Log,
) -> PreprocessResult:
    """Make the prepared folder `output`, or resume one that was begun with the same settings.

    The bytes of the output depend only on `settings` and `tokenizer`, not on `workers` or interruptions. Work in
    progress is in `output`.partial; `output` appears when complete. A bad record is an error with on_error=error, and
    is left out and logged with on_error=skip. A finished output with the same settings is kept.

    Raises ConfigError for a bad record, for an `output` with other settings unless `overwrite`, and for sources that
    changed; OSError, e.g. for a full disk; WorkerDied if a worker process dies.
    """
    if on_error not in ("error", "skip"):
        raise ConfigError(f"on_error={on_error} is neither error nor skip{did_you_mean(on_error, ('error', 'skip'))}")
    if workers < 0:
        raise ConfigError(f"workers={workers} must be at least 1, or 0 to use only this process")
    partial = output.with_name(output.name + ".partial")
    _refuse_own(settings, (output, partial))
    if (counts := _finished(settings, output, overwrite)) is not None:
        shutil.rmtree(_trash(output), ignore_errors=True)
        if read_settings(partial / FILE) == settings.as_json():  # an earlier call was killed after renaming the output
            shutil.rmtree(partial)
        log(f"{output} is already finished; give overwrite=true to make it again")
        return PreprocessResult(counts, Counts(), 0.0, _split(output))
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        _begin(settings, tokenizer, partial, overwrite)
        with ExitStack() as stack:
            job = _Job(settings, tokenizer, Output(partial, tokenizer, stack, log), on_error, log)
            job.run(partial / WHOLE / TOKENIZER, workers)
            counts = job.output.counts
            if not counts.documents:
                seen = f"bad records: {counts.skipped}, empty documents: {counts.empty}"
                raise ConfigError(f"input has no document with text ({seen}); nothing is written")
        _finish(settings, counts, partial, output)
        return PreprocessResult(counts, job.new, job.seconds, _split(output))


def _split(output: Path) -> tuple[int, int]:
    """Return the number of documents in the training and the validation split of a finished output."""
    train, held_out = (IndexedDataset(output / split).num_documents for split in (TRAIN, VALIDATION))
    return train, held_out


class _Job:
    """Remaining work for an output: reading, tokenizing and writing from the last saved place to the end."""

    def __init__(self, settings: PreprocessSettings, tokenizer: Tokenizer, output: Output, on_error: str, log: Log):
        self._settings, self.output, self._on_error, self._log = settings, output, on_error, log
        self._tokenizer = tokenizer
        self._before, self._started = astuple(output.counts), time.monotonic()
        self._long_is_bad = False
        self._shown = 0

    @property
    def new(self) -> Counts:
        """Totals of this call, without work done before a resume."""
        return Counts(*(now - before for now, before in zip(astuple(self.output.counts), self._before, strict=True)))

    @property
    def seconds(self) -> float:
        """Seconds since the first block was requested."""
        return time.monotonic() - self._started

    def run(self, tokenizer: Path, workers: int) -> None:
        """Process the sources to their end."""
        settings, place = self._settings, self.output.place
        if place.source >= len(settings.sources):
            return
        formats = [source.format for source in settings.sources]
        make = (tokenizer, formats, settings.cutting, settings.validation_fraction)
        with Pool(workers, Encoder, *make) as pool:
            sizes = [source.size for source in settings.sources]
            read, unsaved = sum(sizes[: place.source]), 0
            self._started = time.monotonic()
            progress = Progress("tokenizing", sum(sizes), self._log, done=read)
            for block, encoded in pool.map(read_blocks(settings.sources, settings.cutting, place, self._tokenizer)):
                self._write(block, encoded)
                tokens = self.new.tokens
                rate = f"{format_count(tokens)} tokens, {format_count(tokens / max(self.seconds, 1e-9))} tokens/s"
                progress.add(block.read - read, rate)
                read, unsaved = block.read, unsaved + block.size
                if unsaved >= SAVED_BYTES and not (block.part and block.part.more):
                    self.output.save(block.after)
                    unsaved = 0
        self.output.save(InputPlace(len(sizes)))

    def _write(self, block: InputBlock, encoded: Encoded) -> None:
        if block.part is not None:
            self._write_part(block.part, encoded)
            return
        for bad in encoded.bad:
            self._bad(bad)
        self.output.counts.empty += encoded.empty
        self.output.add(encoded.splits)

    def _write_part(self, part: Piece, encoded: Encoded) -> None:
        """Write a part of a long document. The whole document is left out if one part is bad."""
        if part.first:
            self.output.begin_long()
            self._long_is_bad = False
        if encoded.bad and not self._long_is_bad:
            self._long_is_bad = True
            self._bad(encoded.bad[0])
        if encoded.part is not None:
            self.output.add_part(encoded.part)
        if not part.more and not self._long_is_bad:
            assert part.digest is not None
            self.output.end_long(part.digest, self._settings.validation_fraction)

    def _bad(self, bad: Bad) -> None:
        source = self._settings.sources[bad.source]
        what = f"{source.path}:{bad.line}: {bad.reason}"
        if self._on_error == "error":
            raise ConfigError(f"{what}; repair it, or give on_error=skip to leave out such records")
        self.output.skip(bad, source)
        self._shown += 1
        if self._shown <= _SHOWN:
            self._log(f"skipped {what}" + ("; further bad records are not shown" if self._shown == _SHOWN else ""))


def _refuse_own(settings: PreprocessSettings, made: tuple[Path, Path]) -> None:
    """Raise ConfigError if a source is inside the output."""
    for source in settings.sources:
        for folder in made:
            if folder.absolute() in Path(source.path).absolute().parents:
                raise ConfigError(
                    f"input has {source.path}, which is inside the output; give an output outside the input"
                )


def _finished(settings: PreprocessSettings, output: Path, overwrite: bool) -> Counts | None:
    """Return the counts of an `output` finished with these settings; None if it must be made.

    Raises ConfigError if it exists and may not be replaced.
    """
    if not output.exists() and not output.is_symlink():
        return None
    made = read_settings(output / FILE)
    if made is None:
        if output.is_dir() and not any(output.iterdir()):
            return None
        raise ConfigError(f"output={output} exists and was not made by preprocess; give another folder")
    if overwrite:
        return None
    standard_input = any(source.path == STDIN for source in settings.sources)
    differs = "standard input cannot be compared" if standard_input else difference(made, settings.as_json())
    if differs:
        raise ConfigError(f"output={output} is already finished ({differs}); give another folder, or overwrite=true")
    return Counts(**made["counts"])


def _begin(settings: PreprocessSettings, tokenizer: Tokenizer, partial: Path, overwrite: bool) -> None:
    """Write the settings into a new partial folder. Raises ConfigError if the existing one has other settings."""
    new, old = settings.as_json(), read_settings(partial / FILE)
    differs = difference(old, new) if old is not None else ""
    if differs and not overwrite:
        raise ConfigError(f"{partial} has other settings ({differs}); give the same, or overwrite=true to start over")
    kept = (partial / STATE).exists() and (partial / WHOLE).exists()
    if old is None or differs or not kept:
        for leftover in (FILE, STATE, *(f"{split}.lengths" for split in (TRAIN, VALIDATION))):
            (partial / leftover).unlink(missing_ok=True)
        shutil.rmtree(partial / WHOLE, ignore_errors=True)
        tokenizer.save(partial / WHOLE / TOKENIZER)
        write_whole(partial / FILE, json.dumps(new, indent=2, ensure_ascii=False) + "\n")


def _finish(settings: PreprocessSettings, counts: Counts, partial: Path, output: Path) -> None:
    """Write the settings and counts into the output, and rename it to its final name. Replaces an older output."""
    _refuse_changed(settings)
    whole = partial / WHOLE
    if not counts.skipped:
        (whole / SKIPPED).unlink()
    about = settings.as_json() | {"counts": asdict(counts)}
    write_synced(whole / FILE, json.dumps(about, indent=2, ensure_ascii=False) + "\n")
    sync_tree(whole)
    trash = _trash(output)
    shutil.rmtree(trash, ignore_errors=True)
    if output.exists():
        trash.mkdir()
        output.rename(trash / "replaced")
    whole.rename(output)
    sync_folder(output.parent)
    trash.mkdir(exist_ok=True)
    partial.rename(trash / "partial")
    shutil.rmtree(trash)


def _refuse_changed(settings: PreprocessSettings) -> None:
    for source in settings.sources:
        if source.path != STDIN:
            status = Path(source.path).stat()
            if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
                raise ConfigError(f"input: {source.path} changed while it was read; start over with overwrite=true")


def _trash(output: Path) -> Path:
    return output.with_name(f".{output.name}.trash")


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold the lock of the partial folder. Raises ConfigError if another process holds it."""
    with open(partial / "lock", "w") as file:
        if try_lock(file) is False:
            raise ConfigError(f"{partial} is being written by another process; wait for it")
        yield
