"""One walk through a folder of data, for text, records, rows and images: nothing in it is left out silently."""

import os
from collections.abc import Iterable
from pathlib import Path

from gptlite.errors import ConfigError, system_error


def files_below(folder: Path, key: str, suffixes: Iterable[str] = (), *, hidden: bool = False) -> list[Path]:
    """Return the regular files below a folder whose names end in one of `suffixes` (any case; none: all files), sorted
    by path. Linked folders are followed. `hidden`: with files and folders whose names begin with a dot.

    Raises ConfigError, naming `key`, for a folder that cannot be read or that contains itself through a link, and for a
    broken link that may be a folder or a file with such a suffix.
    """
    ends = tuple(suffixes)

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"{key}: {system_error(error, 'make it readable, or give another folder')}")

    paths = []
    for parent, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        if not hidden:
            folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            refuse_loop(key, Path(parent, name))
        for name in names:
            path = Path(parent, name)
            wanted = not ends or name.lower().endswith(ends)
            if (wanted or not path.suffix) and (hidden or not name.startswith(".")):
                refuse_broken_link(key, path)
                if wanted and path.is_file():  # no devices or pipes, which may never end
                    paths.append(path)
    return sorted(paths)


def refuse_broken_link(key: str, path: Path) -> None:
    """Raise ConfigError for a broken link, which would otherwise be left out silently, since is_file() is False."""
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{key}: {path} is a broken link to {os.readlink(path)}; repair or remove it")


def refuse_loop(key: str, folder: Path) -> None:
    """Raise ConfigError if a folder is a link to a folder that contains it: its files would be found many times."""
    if folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{key}: {folder} is a link to {os.readlink(folder)}, which contains it; remove the link")


def linked_folders(files: Iterable[Path], root: Path) -> list[Path]:
    """Return the linked folders below `root` through which a walk has reached files, sorted."""
    parents = {parent for file in files for parent in file.parents if parent != root and root in parent.parents}
    return sorted(parent for parent in parents if parent.is_symlink())
