"""Tiny Shakespeare: the 1.1 MB file of char-rnn and nanoGPT.

    python data/tinyshakespeare/prepare.py output=FOLDER [tokenizer=sentencepiece] [vocab_size=4096] [path=input.txt]

The file comes from the author's repository, or from `path`, and is the same to the byte: its sha256 is checked. The
first 90% are trained on and the rest is held out, as nanoGPT cuts it, each part one document. FOLDER gets tokenizer/,
train and val .bin/.idx, and the same text as train.txt and val.txt.
"""

from dataclasses import dataclass
from pathlib import Path

from gptlite.data.check import check_tokenizer
from gptlite.data.sources import Source, write_folder
from gptlite.tool import run_tool

FILE = Source(
    corpus="tinyshakespeare",
    name="input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    size="1 MB",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
)
TRAINING_SHARE = 0.9  # of the characters


@dataclass
class Arguments:
    """The command line."""

    output: str = "???"
    tokenizer: str = "char"
    vocab_size: int = 4096
    path: str | None = None  # the file, where it cannot be downloaded


def main(arguments: Arguments) -> None:
    """Writes the corpus into `output`. Raises ConfigError if the file cannot be had or is another one."""
    check_tokenizer(arguments.tokenizer, arguments.vocab_size)
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    with FILE.file(arguments.path, output) as file:
        text = file.read_bytes().decode("ascii")
    cut = int(len(text) * TRAINING_SHARE)
    write_folder(output, [text[:cut]], [text[cut:]], arguments.tokenizer, arguments.vocab_size, "document")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
