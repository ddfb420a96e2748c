"""Tiny Shakespeare: the 1.1 MB file of char-rnn and nanoGPT.

    python data/tinyshakespeare/prepare.py output=FOLDER [tokenizer=sentencepiece] [vocab_size=4096] [path=input.txt]

The file comes from the author's repository, or from `path`. Its sha256 is checked. The first 90% is the training split
and the rest is held out, as in nanoGPT, and each split is one document. FOLDER gets tokenizer/, train and val
.bin/.idx, and the same text as train.txt and val.txt.
"""

from dataclasses import dataclass

from gptlite.config.command_line import run_tool
from gptlite.satellites.corpus.sources import RecipeArguments, SourceFile, write_folder

FILE = SourceFile(
    corpus="tinyshakespeare",
    name="input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    size="1 MB",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
)
TRAINING_SHARE = 0.9  # of the characters


@dataclass
class Arguments(RecipeArguments):
    """Command-line arguments."""

    tokenizer: str = "char"


def main(arguments: Arguments) -> None:
    """Write the corpus into `output`. Raises ConfigError if the file is not available or has another hash."""
    with FILE.file(arguments) as file:
        text = file.read_bytes().decode("ascii")
    cut = int(len(text) * TRAINING_SHARE)
    write_folder(arguments, [text[:cut]], [text[cut:]], "document")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
