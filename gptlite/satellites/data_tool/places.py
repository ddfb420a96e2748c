"""Resolution of a path on the command line to datasets."""

from collections.abc import Iterable
from pathlib import Path

from gptlite.data.folder import TOKENIZER
from gptlite.errors import ConfigError
from gptlite.tokenizers.base import Tokenizer, load_tokenizer


def prefixes(path: str) -> list[Path]:
    """Return the prefixes of the datasets in the folder `path`, sorted, or the prefix of the dataset at `path`.

    Raises ConfigError if there is no dataset.
    """
    location = Path(path).expanduser()
    if location.is_dir():
        found = sorted(file.with_suffix("") for file in location.glob("*.idx") if not file.name.startswith("."))
        if not found:
            raise ConfigError(f"{path} holds no .idx; give a prepared folder, or the PREFIX of a .bin and .idx")
        return found
    prefix = as_prefix(location)
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin")]
    if not any(file.exists() for file in files):
        raise ConfigError(f"{path} does not exist; give a prepared folder, or the PREFIX of a .bin and .idx")
    return [prefix]


def as_prefix(path: Path) -> Path:
    """Return PREFIX for PREFIX, PREFIX.bin or PREFIX.idx."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def all_prefixes(paths: Iterable[str]) -> list[Path]:
    """Return the prefixes of the datasets at several paths, without duplicates."""
    return list(dict.fromkeys(prefix for path in paths for prefix in prefixes(path)))


def tokenizer_beside(prefix: Path) -> Tokenizer | None:
    """Return the tokenizer in the folder of a dataset; None without one. Raises ConfigError if it cannot be read."""
    folder = prefix.parent / TOKENIZER
    return load_tokenizer(folder) if folder.exists() else None
