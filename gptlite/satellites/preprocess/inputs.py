"""Resolution of `input=` to a list of source files."""

import glob
from dataclasses import dataclass
from pathlib import Path

from gptlite.errors import ConfigError, did_you_mean, system_error
from gptlite.files import open_regular
from gptlite.satellites.corpus.recognize import refuse_folder, refuse_suffix
from gptlite.satellites.corpus.walk import files_below, refuse_broken_link, refuse_loop

STDIN = "-"
COMPRESSED = {".gz", ".zst", ".xz", ".bz2"}
FORMATS = ("jsonl", "parquet", "text")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_IN_FOLDERS = {*_SUFFIXES, ".txt", ".md", ".text"}


@dataclass(frozen=True)
class Source:
    """Source file, or standard input as `-`. `size` is in bytes on disk, 0 for standard input."""

    path: str
    format: str
    size: int
    modified_ns: int


def find_sources(inputs: str, format: str) -> list[Source]:
    """Return the files of `input=`, in the order of their documents in the output.

    `inputs` is a file, a folder (all files below it with a known suffix, except hidden ones), a glob, `-`, or several
    of these separated by commas. Files of one folder or glob are sorted by path. `format=auto` uses each file's suffix,
    or the suffix before a compression suffix such as .gz. Raises ConfigError for a file that is missing, unreadable or
    given twice.
    """
    if format not in ("auto", *FORMATS):
        raise ConfigError(f"format={format} is not one of auto, {', '.join(FORMATS)}{did_you_mean(format, FORMATS)}")
    if inputs == STDIN:
        if format not in ("jsonl", "text"):
            raise ConfigError(f"input=- needs format=jsonl or format=text; format={format} works only for files")
        return [Source(STDIN, format, 0, 0)]
    parts = [inputs] if Path(inputs).expanduser().exists() else [part for part in inputs.split(",") if part]
    paths = [path for part in parts for path in _expand(part)]
    if not paths:
        raise ConfigError(f"input={inputs} is empty; give a file, a folder, a glob or - for standard input")
    seen: set[Path] = set()
    for path in paths:
        if path in seen:
            raise ConfigError(f"input={inputs} contains {path} twice; give it once")
        seen.add(path)
    return [_source(path, format) for path in paths]


def _expand(part: str) -> list[Path]:
    path = Path(part).expanduser()
    if path.is_dir():
        refuse_folder("input", path)
        files = files_below(path, "input", [known + end for known in _IN_FOLDERS for end in ("", *COMPRESSED)])
        if not files:
            raise ConfigError(f"input={part} holds no files ending in {', '.join(sorted(_IN_FOLDERS))}")
        return files
    if path.exists():
        return [path]
    if part == STDIN:
        raise ConfigError("input=- cannot be combined with files; give it alone")
    matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    for each in sorted({each for file in matches for each in (file, *file.parents)}):
        refuse_broken_link("input", each)
        refuse_loop("input", each)
    files = [file for file in matches if file.is_file()]
    if not files:
        raise ConfigError(f"input={part} matches no file; give an existing file, folder or glob")
    return files


def _stem_suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def _source(path: Path, format: str) -> Source:
    if not path.is_file():  # a pipe or a device may never end, and cannot be read again
        raise ConfigError(f"input: {path} is not a regular file; pipe it into input=-")
    try:
        with open_regular(path):
            status = path.stat()
    except OSError as error:
        raise ConfigError(f"input: {system_error(error)}") from error
    if format == "auto":
        refuse_suffix("input", path)
    kind = _SUFFIXES.get(_stem_suffix(path), "text") if format == "auto" else format
    return Source(str(path), kind, status.st_size, status.st_mtime_ns)
