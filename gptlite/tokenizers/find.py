"""Resolution of a `tokenizer=` argument: a kind, a name, a file or a folder."""

from pathlib import Path

from gptlite import limits
from gptlite.documents import read_bytes
from gptlite.errors import ConfigError, system_error
from gptlite.invocation import command
from gptlite.tokenizers.base import DEFINITION, ByteTokenizer, Tokenizer, load_tokenizer

TIKTOKEN = "tiktoken:"
EXPORTED = "gptlite_tokenizer"  # in a folder of Hugging Face that gptlite exported
_TRAINED = ("sentencepiece", "char")


def find_tokenizer(spec: str, eod: str | None = None) -> Tokenizer:
    """Return the tokenizer of `tokenizer=SPEC`: byte, tiktoken:NAME, or a path to

    - a folder saved by gptlite (a tokenizer, a prepared folder with tokenizer/, or an export), or a folder with
      tokenizer.json, tokenizer.model or tekken.json;
    - a Hugging Face *.json, Mistral's tekken.json, or a *.tiktoken file of ranks;
    - a *.model of SentencePiece, also *.model.v3 as Mistral names it, or of Llama 3 or 4.

    `eod` is the text of the token that ends documents, if not the format's own or if the format has none. Raises
    ConfigError if the tokenizer does not exist or cannot be read, or already has its own `eod`.
    """
    if spec == "byte":
        _refuse_end(spec, eod)
        return ByteTokenizer()
    if spec in _TRAINED and not Path(spec).exists():
        raise ConfigError(f"tokenizer={spec} must be trained first: {command('train-tokenizer')} kind={spec} input=...")
    if spec.startswith(TIKTOKEN):
        from gptlite.tokenizers.tiktoken import TiktokenTokenizer

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
    for ours in (folder, folder / "tokenizer", folder / EXPORTED):
        if (ours / DEFINITION).is_file():
            _refuse_end(str(folder), eod)
            return load_tokenizer(ours)
    names = ("tokenizer.json", "tokenizer.model", "tekken.json")
    for name in names:
        if (folder / name).is_file():
            return _of_file(folder / name, str(folder / name), eod)
    tried = ", ".join((DEFINITION, f"tokenizer/{DEFINITION}", *names))
    raise ConfigError(f"tokenizer={folder} holds none of {tried}")


def _refuse_end(spec: str, eod: str | None) -> None:
    if eod is not None:
        raise ConfigError(f"eod={eod}: tokenizer={spec} has an end-of-document token of its own; leave out eod=")


def _of_file(path: Path, spec: str, eod: str | None) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(f"tokenizer={spec} is neither byte nor {TIKTOKEN}NAME, and there is no file or folder {path}")
    from gptlite.tokenizers.tiktoken import TiktokenTokenizer, is_ranks, is_tekken

    if path.suffix == ".json":
        from gptlite.tokenizers.huggingface import HuggingFaceTokenizer

        return TiktokenTokenizer.of_tekken(path, eod) if is_tekken(path) else HuggingFaceTokenizer.of_file(path, eod)
    if ".model" in path.suffixes[-2:]:  # Mistral appends its version, e.g. tokenizer.model.v3
        from gptlite.tokenizers.sentence_piece import SentencePieceTokenizer

        if not is_ranks(path):
            return SentencePieceTokenizer(read_bytes(path, limits.TOKENIZER_BYTES), eod or "")
    elif path.suffix != ".tiktoken":
        raise ConfigError(f"tokenizer={spec} does not end in .json, .model or .tiktoken")
    return TiktokenTokenizer.of_file(path, eod)
