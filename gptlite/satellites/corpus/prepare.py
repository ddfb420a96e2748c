"""Preparation of text and corpora on first use, in a cache of prepared folders."""

from pathlib import Path

from gptlite.data.check import check_settings
from gptlite.data.folder import TOKENIZER, TRAIN, VALIDATION
from gptlite.data.opened import require_same
from gptlite.data.prepared import PreparedData, open_folder
from gptlite.errors import ConfigError, known_home
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_main, together
from gptlite.progress import Log, Progress
from gptlite.satellites.corpus.cache import cached_folder, cached_path
from gptlite.satellites.corpus.config import CorpusConfig, TextConfig
from gptlite.satellites.corpus.recipes import find_recipe, recipe_digest, run_recipe, source_path
from gptlite.satellites.corpus.text import find_files, split_text, text_digest
from gptlite.satellites.corpus.write import train_tokenizer, write_split

_VERSION = "1"  # of the format that `open_text` writes; a new version invalidates every cached folder


def open_text(config: TextConfig | CorpusConfig, log: Log, mesh: Mesh) -> PreparedData:
    """Return the tokens of text or of a corpus, from the cache or prepared now.

    All ranks of `mesh` must call this. Rank 0 prepares the data while the others wait without a time limit; then all
    ranks open the folder. A machine that cannot see that folder prepares its own copy under the same name.

    Raises ConfigError for invalid settings, text shorter than a sequence, a failed recipe, and damaged files. A failure
    leaves no new prepared folder. An error on one rank is raised on all ranks.
    """
    folder = from_main(mesh, lambda: _folder(config, log))
    data = together(mesh, lambda: _opened(folder, config, log))
    require_same(data.identity, mesh, f"data.cache_dir={folder.parent}: machines prepared different data")
    return data


def _folder(config: TextConfig | CorpusConfig, log: Log) -> Path:
    """Return the prepared folder. Prepare it first if it is not in the cache."""
    check_settings(config)
    name, key = _key(config, log)

    def make(folder: Path) -> None:
        source = config.path if isinstance(config, TextConfig) else config.corpus
        log(f"preparing {source} once, into {config.cache_dir}")
        if isinstance(config, TextConfig):
            _prepare_text(config, key, folder, log)
        else:
            run_recipe(config, folder, log)
        _open_prepared(folder, config)

    return cached_folder(_cache(config), name, key, make, log)


def _opened(folder: Path, config: TextConfig | CorpusConfig, log: Log) -> PreparedData:
    """Open the data in rank 0's `folder`. If the folder is not visible here, prepare it once per machine."""
    if not folder.is_dir():
        folder = _folder(config, log)
    return _open_prepared(folder, config)


def _open_prepared(folder: Path, config: TextConfig | CorpusConfig) -> PreparedData:
    name, source = "text", f"data.path={config.path}"
    if isinstance(config, CorpusConfig):
        name, source = config.corpus, f"data.corpus={config.corpus}"
    return open_folder(folder, name, config.sequence_length, source)


def prepared_folder(config: TextConfig | CorpusConfig, log: Log) -> Path:
    """Return the path of the prepared folder, which may not exist yet. Raises ConfigError for an unreadable source."""
    return cached_path(_cache(config), *_key(config, log))


def _cache(config: TextConfig | CorpusConfig) -> Path:
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
    script, source = find_recipe(config.corpus), source_path(config)
    return config.corpus, common | {
        "corpus": config.corpus,
        "recipe": recipe_digest(script),
        # Size and time stand for the content, which may be many gigabytes.
        "source": "" if source is None else f"{source} {source.stat().st_size} {source.stat().st_mtime_ns}",
        **{f"argument {name}": value for name, value in config.arguments.items() if value is not None},
    }


def _prepare_text(config: TextConfig, key: dict[str, str], folder: Path, log: Log) -> None:
    files = find_files(config.path)
    spans = [split_text(path, config.validation_fraction) for path in files]
    train, held_out = ([span for span in part if span.size] for part in zip(*spans, strict=True))
    tokenizer = train_tokenizer(config.tokenizer, config.vocab_size, train, held_out, log)
    tokenizer.save(folder / TOKENIZER)
    progress = Progress("tokenizing", sum(span.size for span in train + held_out), log)
    write_split(folder / TRAIN, train, tokenizer, progress)
    write_split(folder / VALIDATION, held_out, tokenizer, progress)
    if text_digest(files, _cache(config), log) != key["text"]:
        raise ConfigError(f"data.path={config.path} changed while it was read; start again once writing has ended")
