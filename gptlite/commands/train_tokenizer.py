"""Train a tokenizer on a corpus, or export one to a folder that transformers reads.

gptlite train-tokenizer input='corpus/*.jsonl.zst' output=FOLDER [vocab_size=32000] [kind=sentencepiece]
    [sample_mb=64] [validation_fraction=0.005] [format=auto] [field=text] [separator=] [overwrite=false] [export=FOLDER]
gptlite train-tokenizer tokenizer=FOLDER export=FOLDER

input, format, field and separator are as in gptlite preprocess; give both the same validation_fraction, so that
held-out text is not used for training. Of a corpus above sample_mb megabytes, only a sample of that size is used. kind
is sentencepiece (a byte-fallback BPE) or char. Pass `output` to preprocess as tokenizer=. `export` is a folder for
tokenizer.json and tokenizer_config.json, which transformers.AutoTokenizer.from_pretrained reads, with the same ids for
every text. Exit codes: 0 done, 2 refused, 130 stopped.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.files import new_folder, refuse_used
from gptlite.progress import log


@dataclass
class Arguments:
    """Command-line arguments."""

    input: str | None = None
    output: str | None = None
    tokenizer: str | None = None  # an existing tokenizer to export, instead of input
    export: str | None = None
    kind: str = "sentencepiece"
    vocab_size: int = 32000
    sample_mb: int = 64
    validation_fraction: float = 0.005
    format: str = "auto"
    field: str = "text"
    separator: str = ""
    max_record_bytes: int = 128 << 20
    overwrite: bool = False


def main() -> NoReturn:
    """Run the command line and exit."""
    run_tool(train_or_export, Arguments, __doc__)


def train_or_export(arguments: Arguments) -> None:
    """Train a tokenizer or load the one given, and export it if requested."""
    from gptlite.tokenizers.export import export_tokenizer
    from gptlite.tokenizers.find import find_tokenizer

    output, export = (Path(path).expanduser() if path else None for path in (arguments.output, arguments.export))
    if (arguments.input is None) == (arguments.tokenizer is None):
        raise ConfigError("give either input=... to train on, or tokenizer=... to export")
    if export is not None:
        refuse_used("export", export)
    if arguments.tokenizer is not None:
        if export is None:
            raise ConfigError("tokenizer=... needs export=FOLDER, the folder to write")
        tokenizer = find_tokenizer(arguments.tokenizer)
    else:
        if output is None:
            raise ConfigError("output is not set; give it as output=FOLDER")
        tokenizer = train(arguments, output)
        size, fingerprint = tokenizer.vocab_size, tokenizer.fingerprint[:16]
        print(f"{output}: {tokenizer.kind}, vocabulary size {size}, fingerprint {fingerprint}")
    if export is not None:
        export_tokenizer(tokenizer, export)
        print(f"{export}: can be loaded with transformers.AutoTokenizer.from_pretrained")


def train(arguments: Arguments, output: Path):
    """Train a tokenizer and save it as `output`, replacing an older one only with overwrite=true."""
    from gptlite.satellites.preprocess.settings import make_settings
    from gptlite.satellites.preprocess.train import train_tokenizer
    from gptlite.tokenizers.base import DEFINITION

    if output.exists():
        if not (output / DEFINITION).is_file():
            raise ConfigError(f"output={output} exists and is not a gptlite tokenizer; give another folder")
        if not arguments.overwrite:
            raise ConfigError(f"output={output} exists; give another folder, or overwrite=true")
    settings = make_settings(arguments)
    tokenizer = train_tokenizer(settings, arguments.kind, arguments.vocab_size, arguments.sample_mb, log)
    with new_folder(output, replace=arguments.overwrite) as folder:
        tokenizer.save(folder)
    return tokenizer
