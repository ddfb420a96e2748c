"""Construction of a run's data from its configuration: prepared on first use, opened, and read by a `Loader`."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import gptlite
from gptlite.data.batches import batch_schedule
from gptlite.data.cache import cached_folder, cached_path
from gptlite.data.check import check_settings, find_recipe
from gptlite.data.config import CorpusConfig, DataConfig, DatasetConfig, SyntheticConfig, TextConfig, TokensConfig
from gptlite.data.corpus import TOKENIZER, TRAIN, VALIDATION, train_tokenizer, write_split
from gptlite.data.indexed import token_dtype
from gptlite.data.loader import HeldOut, Loader, Share
from gptlite.data.prepared import Identity, PreparedData, TokenSet, make_identity, open_blend, open_folder
from gptlite.data.samples import SampleLoader, SampleSets, open_samples
from gptlite.data.stream import SampleStream
from gptlite.data.text import find_files, split, text_digest
from gptlite.errors import ConfigError, known_home
from gptlite.parallelism.axes import CONTEXT
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import chunk_starts, largest_micro_batch
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import ALONE, from_all, from_main, together
from gptlite.progress import Log, Progress
from gptlite.tokenizers.base import NumberTokenizer

_VERSION = "1"  # of the format that `prepare` writes; a new version invalidates every cached folder
_SYNTHETIC_VALIDATION = 0.01  # number of held-out tokens per training token


def prepare(config: DataConfig, seed: int, log: Log = print, mesh: Mesh = ALONE) -> PreparedData:
    """Return the data of a run, from the cache or prepared now. `seed` only affects synthetic tokens.

    All ranks of `mesh` must call this. Rank 0 prepares the data while the others wait without a time limit; then all
    ranks open the folder. A machine that cannot see that folder prepares its own copy under the same name.

    Raises ConfigError for invalid settings, text shorter than a sequence, a failed recipe, and damaged files. A failure
    leaves no new prepared folder. An error on one rank is raised on all ranks.
    """
    if isinstance(config, DatasetConfig):
        raise ConfigError("data is a dataset of samples, but text or tokens are needed; choose another data=...")
    if isinstance(config, SyntheticConfig):
        check_settings(config)
        return _synthetic(config, seed)
    if isinstance(config, TokensConfig):
        data = together(mesh, lambda: _tokens(config))
        differ = "data: machines hold different tokens under the same path"
    else:
        folder = from_main(mesh, lambda: _folder(config, log))
        data = together(mesh, lambda: _opened(folder, config, log))
        differ = f"data.cache_dir={folder.parent}: machines prepared different data"
    _require_same(data.identity, mesh, differ)
    return data


def open_data(config: DataConfig, seed: int, log: Log, mesh: Mesh) -> PreparedData | SampleSets:
    """Return the samples of a registered dataset, or prepared data. All ranks of `mesh` must call this.

    Raises the ConfigErrors of `open_samples` and `prepare`.
    """
    if not isinstance(config, DatasetConfig):
        return prepare(config, seed, log, mesh)
    check_settings(config)
    data = together(mesh, lambda: open_samples(config))
    _require_same(data.identity, mesh, f"data={data.name}: ranks opened different datasets")
    return data


def _require_same(identity: Identity, mesh: Mesh, differ: str) -> None:
    if len(set(from_all(mesh, lambda: json.dumps(identity, sort_keys=True)))) > 1:
        raise ConfigError(f"{differ}; use a folder that all ranks share")


def _folder(config: DataConfig, log: Log) -> Path:
    """Return the prepared folder. Prepare it first if it is not in the cache."""
    check_settings(config)
    assert isinstance(config, TextConfig | CorpusConfig)
    name, key = _key(config, log)

    def make(folder: Path) -> None:
        source = config.path if isinstance(config, TextConfig) else config.corpus
        log(f"preparing {source} once, into {config.cache_dir}")
        if isinstance(config, TextConfig):
            _prepare_text(config, key, folder, log)
        else:
            _run_recipe(config, folder, log)
        _open_prepared(folder, config)

    return cached_folder(_cache(config), name, key, make, log)


def _opened(folder: Path, config: DataConfig, log: Log) -> PreparedData:
    """Open the data in rank 0's `folder`. If the folder is not visible here, prepare it once per machine."""
    if not folder.is_dir():
        folder = _folder(config, log)
    return _open_prepared(folder, config)


def _open_prepared(folder: Path, config: DataConfig) -> PreparedData:
    assert isinstance(config, TextConfig | CorpusConfig)
    name, source = "text", f"data.path={config.path}"
    if isinstance(config, CorpusConfig):
        name, source = config.corpus, f"data.corpus={config.corpus}"
    return open_folder(folder, name, config.sequence_length, source)


def _tokens(config: TokensConfig) -> PreparedData:
    check_settings(config)
    blend = {str(folder): float(weight) for folder, weight in (config.blend or {config.path: 1.0}).items()}
    return open_blend(blend, config.sequence_length, beside=config.path if config.blend else None)


def build_loader(
    config: DataConfig,
    prepared: PreparedData | SampleSets,
    mesh: Mesh,
    seed: int,
    parallelism: ParallelismConfig | None = None,
) -> Loader | SampleLoader:
    """Return this rank's loader. `micro_batch_size: null` selects the largest size that the layout can run.

    Raises ConfigError if a global batch size is not divisible by the micro-batch size times the number of data-parallel
    ranks.
    """
    micro, schedule = config.micro_batch_size, batch_schedule(config.global_batch_size, config.batch_ramp)
    if micro is None:
        micro = largest_micro_batch(parallelism or ParallelismConfig(), schedule.sizes(), mesh.data_size)
    uneven = [size for size in schedule.sizes() if micro is None or size % (micro * mesh.data_size)]
    if micro is None or uneven:
        words = f" (in data.batch_ramp={config.batch_ramp})" if config.batch_ramp else ""
        raise ConfigError(
            f"data.global_batch_size={uneven[0]}{words} is not divisible by "
            f"{f'data.micro_batch_size={micro} x ' if micro else ''}{mesh.data_size} data-parallel ranks"
        )
    if isinstance(prepared, SampleSets):
        assert isinstance(config, DatasetConfig)
        return SampleLoader(
            prepared,
            seed,
            schedule=schedule,
            micro_batch_size=micro,
            device=mesh.device,
            share=Share(mesh.data_rank, mesh.data_size),
            workers=config.workers,
        )
    length, sets = config.sequence_length, prepared.sets
    held_out = HeldOut(
        {each.name: each.validation for each in sets},
        prepared.tokenizer.token_bytes(),
        {each.name: each.validation_bytes for each in sets},
    )
    return Loader(
        SampleStream.begin(seed, length, {each.name: (each.data, each.train, each.weight) for each in sets}),
        held_out,
        schedule=schedule,
        micro_batch_size=micro,
        device=mesh.device,
        share=Share(mesh.data_rank, mesh.data_size, _positions(length, mesh)),
        document_end=prepared.tokenizer.eod if config.documents else None,
    )


def _positions(length: int, mesh: Mesh) -> np.ndarray | None:
    """Return the positions in a sequence that this rank holds under context parallelism; None for all."""
    ranks = mesh.size(CONTEXT)
    if ranks == 1:
        return None
    chunk = np.arange(length // (2 * ranks))
    return np.concatenate([start + chunk for start in chunk_starts(length, ranks, mesh.coordinate(CONTEXT))])


def prepared_folder(config: TextConfig | CorpusConfig, log: Log) -> Path:
    """Return the path of the prepared folder, which may not exist yet. Raises ConfigError for an unreadable source."""
    return cached_path(_cache(config), *_key(config, log))


def _cache(config: DataConfig) -> Path:
    with known_home("data.cache_dir"):
        return Path(config.cache_dir).expanduser()


def _key(config: TextConfig | CorpusConfig, log: Log) -> tuple[str, dict[str, str]]:
    """Return the name of the prepared folder, and the cache key: all settings and sources that determine its data."""
    common = {
        "version": _VERSION,
        "tokenizer": config.tokenizer,
        "vocab_size": str(config.vocab_size if config.tokenizer == "sentencepiece" else None),
    }
    if isinstance(config, TextConfig):
        text = text_digest(find_files(config.path), _cache(config), log)
        return "text", common | {"text": text, "validation_fraction": str(config.validation_fraction)}
    script, source = find_recipe(config.corpus), _source(config)
    return config.corpus, common | {
        "corpus": config.corpus,
        "recipe": hashlib.sha256(script.read_bytes()).hexdigest(),
        # Size and time stand for the content, which may be many gigabytes.
        "source": "" if source is None else f"{source} {source.stat().st_size} {source.stat().st_mtime_ns}",
        **{f"argument {name}": value for name, value in config.arguments.items() if value is not None},
    }


def _prepare_text(config: TextConfig, key: dict[str, str], folder: Path, log: Log) -> None:
    files = find_files(config.path)
    spans = [split(path, config.validation_fraction) for path in files]
    train, held_out = ([span for span in part if span.size] for part in zip(*spans, strict=True))
    tokenizer = train_tokenizer(config.tokenizer, config.vocab_size, train, held_out, log)
    tokenizer.save(folder / TOKENIZER)
    progress = Progress("tokenizing", sum(span.size for span in train + held_out), log)
    write_split(folder / TRAIN, train, tokenizer, progress)
    write_split(folder / VALIDATION, held_out, tokenizer, progress)
    if text_digest(files, _cache(config), log) != key["text"]:
        raise ConfigError(f"data.path={config.path} changed while it was read; start again once writing has ended")


def _source(config: CorpusConfig) -> Path | None:
    return Path(config.path).expanduser().resolve() if config.path else None


def _run_recipe(config: CorpusConfig, folder: Path, log: Log) -> None:
    # A recipe is a separate program. It runs with this Python and this gptlite, installed or not.
    script, source = find_recipe(config.corpus), _source(config)
    arguments = {"output": folder, "tokenizer": config.tokenizer, "vocab_size": config.vocab_size, "path": source}
    options = [f"{name}={value}" for name, value in (arguments | config.arguments).items() if value is not None]
    paths = [str(Path(gptlite.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    last = ""
    with subprocess.Popen(
        [sys.executable, "-u", str(script), *options],  # -u: unbuffered, so lines arrive when printed
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    ) as process:
        try:
            for line in process.stdout or ():
                if last:
                    log(last)
                last = line.rstrip()  # held back: after a failure, the last line is the error
            code = process.wait()
        finally:
            process.kill()  # otherwise the recipe would continue after Ctrl-C
    if code:  # the last line of output gives the reason
        failed = f"data.corpus={config.corpus}: {script} failed: {last}"
        raise ConfigError(last.removeprefix("error: ") if code == 2 else failed)
    if last:
        log(last)


def _synthetic(config: SyntheticConfig, seed: int) -> PreparedData:
    tokenizer = NumberTokenizer(config.vocab_size)
    held_out = max(round(config.num_tokens * _SYNTHETIC_VALIDATION), config.sequence_length + 1)  # one chunk at least
    dtype = np.uint16 if token_dtype(config.vocab_size) == np.uint16 else np.int32
    tokens = np.random.default_rng(seed).integers(config.vocab_size, size=config.num_tokens + held_out, dtype=dtype)
    source = f"synthetic/{seed}/{config.num_tokens}"
    only = TokenSet("synthetic", source, tokens[: config.num_tokens], tokens[config.num_tokens :])
    identity = make_identity("synthetic", tokenizer, config.sequence_length, train=source, validation=source)
    return PreparedData("synthetic", None, tokenizer, (only,), identity)
