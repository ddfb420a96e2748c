"""Which text it is, without reading all of it at every start."""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

from gptlite.data.text import scan
from gptlite.errors import ConfigError
from gptlite.files import write_whole
from gptlite.progress import Log

_VERSION = 1  # of what `scan` checks: a new one reads every text anew
_LARGE = 16 * 2**20  # bytes
_SETTLED = 2_000_000_000  # nanoseconds; the coarsest clock a file system stamps its files with (FAT)


def text_digest(files: list[Path], cache_dir: Path, log: Log) -> str:
    """`scan(files)`, remembered in `cache_dir` for as long as each file has the same path, size and times.

    The change time counts beside the modification time, which copying tools set back. Raises what `scan` raises, and
    ConfigError if a file changes meanwhile.
    """
    stamps = _stamps(files)
    paths = json.dumps([_VERSION, [path for path, *_ in stamps]])
    note = cache_dir / f".digest-{hashlib.sha256(paths.encode()).hexdigest()[:16]}.json"
    state = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    with suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or not one of ours
        remembered = json.loads(note.read_text(encoding="utf-8"))
        if remembered["state"] == state:
            return str(remembered["sha256"])
    digest = scan(files, log)
    if _stamps(files) != stamps:
        raise ConfigError(f"data.path: {files[0].parent} changed while it was read; start again when nothing writes it")
    # A small text is read again in no time. A file stamped a moment ago could change once more under the same stamp.
    large = sum(size for _, size, *_ in stamps) >= _LARGE
    if large and time.time_ns() - max(max(times) for _, _, *times in stamps) > _SETTLED:
        with suppress(OSError):  # a cache that others prepared may be read-only
            cache_dir.mkdir(parents=True, exist_ok=True)
            write_whole(note, json.dumps({"state": state, "sha256": digest}) + "\n")
    return digest


def _stamps(files: list[Path]) -> list[tuple[str, int, int, int]]:
    """Absolute path, bytes, and the times of modification and change in nanoseconds, of each file."""
    stamps = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"data.path: {path} cannot be read ({error.strerror})") from error
        stamps.append((str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return stamps
