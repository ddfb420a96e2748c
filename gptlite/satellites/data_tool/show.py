"""Show the text of a training sample: show PATH [sample=N] [step=N] [split=train] [sequence_length=256]

In a run's folder, step=N shows all samples of that step (counted from 1), and sample=N shows the N-th sample of the run
(counted from 0). In a prepared folder, sample=N shows the N-th chunk of the split (counted from 0), in file order; a
chunk has sequence_length tokens. Ends of documents are marked.
plugins=[MODULE,...] imports the plugins of a run that needs them.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gptlite.config.plugins import import_plugins
from gptlite.config.saved import read_saved
from gptlite.config.schema import Config
from gptlite.data.eras import Era
from gptlite.data.folder import TRAIN
from gptlite.data.indexed import IndexedDataset
from gptlite.data.order_log import OrderRow, read_order, row_of_step
from gptlite.data.stream import SampleStream, num_chunks, read_chunks
from gptlite.errors import ConfigError, printable
from gptlite.metrics.jsonl import read_rows
from gptlite.progress import log
from gptlite.satellites.data_tool.places import prefixes, tokenizer_beside
from gptlite.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from gptlite.data.prepared import PreparedData

END = "\n<<< end of document >>>\n"


@dataclass
class Options:
    """Command-line options."""

    sample: int | None = None
    step: int | None = None
    split: str = "train"
    sequence_length: int = 256
    plugins: list[str] = field(default_factory=list)


def run(paths: list[str], options: Options) -> int:
    """Print the text. Raises ConfigError for a sample or a step that does not exist."""
    for key, value, least in (("sample", options.sample, 0), ("step", options.step, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{key}={value} must be at least {least}")
    folder = Path(paths[0]).expanduser()
    if (folder / "config.yaml").exists():
        shown = of_run(folder, options)
    elif options.step is not None:
        raise ConfigError(f"step={options.step} needs a run folder, and {folder} has no config.yaml; give sample=N")
    else:
        shown = of_folder(folder, options)
    for line in shown:
        print(printable(line, "\n\t"))
    return 0


def of_folder(folder: Path, options: Options) -> Iterator[str]:
    """Yield the lines to print for one chunk of a prepared folder. Raises ConfigError if there is no such chunk."""
    if options.sample is None or options.sequence_length < 1:
        low = f"sequence_length={options.sequence_length} must be at least 1"
        raise ConfigError("sample is not set; give sample=N" if options.sample is None else low)
    prefix = next((each for each in prefixes(str(folder)) if each.name == options.split), None)
    if prefix is None:
        raise ConfigError(f"split={options.split}: {folder} has {', '.join(p.name for p in prefixes(str(folder)))}")
    if (tokenizer := tokenizer_beside(prefix)) is None:
        raise ConfigError(f"{folder} has no tokenizer/ to decode its tokens")
    dataset, length = IndexedDataset(prefix), options.sequence_length
    if (count := num_chunks(dataset.tokens, length)) <= options.sample:
        raise ConfigError(f"sample={options.sample}: {prefix} has {count:,} samples of {length} tokens, counted from 0")
    start = options.sample * length
    tokens = dataset.tokens[start : start + length]
    yield f"sample {options.sample} of {prefix}: {place(start, start + len(tokens), dataset)}"
    yield as_text(tokens, tokenizer)


def of_run(folder: Path, options: Options) -> Iterator[str]:
    """Yield the lines to print for the samples of a step, or for one sample of a run."""
    from gptlite.data.build import prepare  # imports torch, so only here

    if options.step is None and options.sample is None:
        raise ConfigError("give step=N, or sample=N")
    import_plugins(options.plugins)
    config = read_saved(folder / "config.yaml")
    if (steps := config.trainer.max_steps) < (options.step or 0):
        raise ConfigError(f"step={options.step}: the run in {folder} ends with step {steps} (trainer.max_steps)")
    data = prepare(config.data, config.seed, log)
    rows = read_order(folder)
    if options.step is not None:
        row = row_of_step(rows, options.step) or row_of_old(folder, config, data, options.step, rows)
    else:
        row = rows[-1] if rows else row_of_old(folder, config, data, 1, rows)
    chosen = [options.sample or 0]
    if options.step is not None:
        samples = row.schedule().samples(row.first_sample(options.step)).tolist()
        if options.sample is not None and options.sample not in samples:
            reason = f"step {options.step} read samples {samples[0]} to {samples[-1]}"
            raise ConfigError(f"sample={options.sample}: {reason}; leave out step, or sample")
        yield f"step {options.step} of {folder}: samples {samples[0]} to {samples[-1]}"
        chosen = samples if options.sample is None else chosen
    elif chosen[0] >= (end := row.first_sample(steps + 1)):
        reason = f"the run in {folder} ends with sample {end - 1} in step {steps} (trainer.max_steps)"
        raise ConfigError(f"sample={options.sample}: {reason}")
    yield from of_stream(config.seed, [Era.from_json(era) for era in row.eras], data, chosen)


def of_stream(seed: int, eras: list[Era], data: "PreparedData", samples: list[int]) -> Iterator[str]:
    """Yield the lines to print for the samples with these numbers. Raises ConfigError if their data has changed."""
    now = {each.data: each for each in data.sets}
    stream = SampleStream(seed, eras)
    for sample in samples:
        number, epoch, chunk = (int(each[0]) for each in stream.locate(np.array([sample])))
        era = next(era for era in reversed(eras) if era.start <= sample)
        name, length = stream.names[number], era.sequence_length
        wanted = era.sets[name].data
        name = now[wanted].name if wanted in now else name
        dataset = (opened(data.folder, wanted) if data.folder else None) or opened(Path(name).expanduser(), wanted)
        if wanted not in now and dataset is None:
            raise ConfigError(f"sample {sample} was read from {name}, which no longer has the same tokens")
        tokens, start = now[wanted].train if dataset is None else dataset.tokens, chunk * length
        read = read_chunks(tokens, np.array([chunk]), length)[0]
        yield f"\nsample {sample}: {name}, epoch {epoch}, {place(start, start + length, dataset)}"
        yield as_text(read[:-1], data.tokenizer)


def opened(folder: Path, data: str) -> IndexedDataset | None:
    """Open the training tokens of a prepared folder, or return None if their SHA-256 is not `data`."""
    try:
        dataset = IndexedDataset(folder / TRAIN)
    except ConfigError:
        return None
    return dataset if dataset.meta is not None and dataset.meta.sha256 == data else None


def row_of_old(folder: Path, config: Config, data: "PreparedData", step: int, rows: list[OrderRow]) -> OrderRow:
    """Return a data-order row for a step that data_order.jsonl lacks, because an older version started the run.

    If the run was resumed later, the first row is extended back to step 0. Otherwise the row is derived from the
    configuration and metrics.jsonl, with a single era.
    """
    length, batch = config.data.sequence_length, config.data.global_batch_size
    if rows and rows[0].step:  # the run was resumed later: derive the batch size from the first row
        return replace(rows[0], step=0, samples=0, global_batch_size=rows[0].samples // rows[0].step)
    sets = {each.name: (each.data, each.train, each.weight) for each in data.sets}
    eras = SampleStream.begin(config.seed, length, sets).eras
    counted = (0, 0)
    if (metrics := folder / "metrics.jsonl").exists():
        for row in read_rows(metrics):
            if "loss" in row and counted[0] <= row["step"] < step:
                counted = row["step"], row["tokens"] // length
    ramp = config.data.batch_ramp
    return OrderRow(*counted, global_batch_size=batch, eras=[era.to_json() for era in eras], batch_ramp=ramp)


def place(start: int, stop: int, dataset: IndexedDataset | None) -> str:
    """Return e.g. `tokens 256 to 511, documents 3 to 5`, both counted from 0."""
    text = f"tokens {start:,} to {stop - 1:,}"
    if dataset is None or len(dataset.lengths) != dataset.num_documents:
        return text
    size, pointers = dataset.dtype.itemsize, dataset.pointers
    first, last = (
        bisect_right(range(dataset.num_documents), token * size, key=lambda n: int(pointers[n])) - 1
        for token in (start, stop - 1)
    )
    return f"{text}, document{f' {first:,}' if first == last else f's {first:,} to {last:,}'}"


def as_text(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return the text of tokens, with the ends of documents marked."""
    parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.eod) + 1)
    texts = [tokenizer.decode(part[part != tokenizer.eod].tolist()) for part in parts]
    return END.join(texts)
