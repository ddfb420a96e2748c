"""Resolution of a `tokenizer=` argument: a kind, a name, a file or a folder."""

from pathlib import Path

from gptlite import limits
from gptlite.data.tokenizer import DEFINITION, ByteTokenizer, Tokenizer, load_tokenizer
from gptlite.documents import read_bytes
from gptlite.errors import ConfigError, system_error
from gptlite.invocation import command

TIKTOKEN = "tiktoken:"
_TRAINED = ("sentencepiece", "char")


def find_tokenizer(spec: str, eod: str | None = None) -> Tokenizer:
    """Return the tokenizer of `tokenizer=SPEC`: byte, tiktoken:NAME, or a path to

    - a folder saved by gptlite (a tokenizer, or a prepared folder with tokenizer/), or a folder with tokenizer.json
      or tokenizer.model;
    - a Hugging Face *.json, a SentencePiece *.model, Llama 3's tokenizer.model, or a *.tiktoken file of ranks.

    `eod` is the text of the token that ends documents, for formats that do not define one. Raises ConfigError if the
    tokenizer does not exist or cannot be read.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec in _TRAINED and not Path(spec).exists():
        raise ConfigError(f"tokenizer={spec} must be trained first: {command('train-tokenizer')} kind={spec} input=...")
    if spec.startswith(TIKTOKEN):
        from gptlite.data.tiktoken_tokenizer import TiktokenTokenizer

        return TiktokenTokenizer.of_name(spec.removeprefix(TIKTOKEN), eod)
    path = Path(spec).expanduser()
    try:
        return _of_folder(path, eod) if path.is_dir() else _of_file(path, spec, eod)
    except OSError as error:
        raise ConfigError(f"tokenizer={spec}: {system_error(error)}") from error
    except ValueError as error:  # ConfigError or DocumentError
        known = isinstance(error, ConfigError) and str(path) in str(error)
        raise error if known else ConfigError(f"tokenizer={spec}: {error}") from error


def _of_folder(folder: Path, eod: str | None) -> Tokenizer:
    for ours in (folder, folder / "tokenizer"):
        if (ours / DEFINITION).is_file():
            return load_tokenizer(ours)
    names = ("tokenizer.json", "tokenizer.model")
    for name in names:
        if (folder / name).is_file():
            return _of_file(folder / name, str(folder / name), eod)
    tried = ", ".join((DEFINITION, f"tokenizer/{DEFINITION}", *names))
    raise ConfigError(f"tokenizer={folder} holds none of {tried}")


def _of_file(path: Path, spec: str, eod: str | None) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(f"tokenizer={spec} is neither byte nor {TIKTOKEN}NAME, and there is no file or folder {path}")
    match path.suffix:
        case ".json":
            from gptlite.data.huggingface_tokenizer import HuggingFaceTokenizer

            return HuggingFaceTokenizer.of_file(path, eod)
        case ".model":
            from gptlite.data.sentence_piece import SentencePieceTokenizer
            from gptlite.data.tiktoken_tokenizer import TiktokenTokenizer, is_ranks

            if is_ranks(path):
                return TiktokenTokenizer.of_llama(path, eod)
            return SentencePieceTokenizer(read_bytes(path, limits.TOKENIZER_BYTES))
        case ".tiktoken":
            from gptlite.data.tiktoken_tokenizer import TiktokenTokenizer

            return TiktokenTokenizer.of_file(path, eod)
        case _:
            raise ConfigError(f"tokenizer={spec} does not end in .json, .model or .tiktoken")
