"""Data in formats of other tools, known by name or first bytes, which would otherwise be read as something else."""

from __future__ import annotations

from pathlib import Path

from gptlite.errors import ConfigError
from gptlite.files import open_regular
from gptlite.invocation import command

_ARROW = "an Arrow dataset of Hugging Face's save_to_disk"
_TO_PARQUET = "write it as Parquet: datasets.load_from_disk('{path}'){split}.to_parquet('text.parquet')"
_MDS = "a dataset of MosaicML's streaming (MDS)"
_FROM_MDS = (
    "write its texts as JSON lines: print(json.dumps({{'text': row['text']}})) for each row of "
    "streaming.LocalDataset('{path}')"
)
_LITDATA = "a dataset of LitData"
_FROM_LITDATA = (
    "write its tokens to a file with numpy.array(row, 'uint16').tofile(file), for each row of "
    "litdata.StreamingDataset('{path}', item_loader=litdata.TokensLoader(block_size=1)); import it with format=nanogpt"
)
_IMPORT = "import it: {import_} {path} format={format} ..."
_RAW = "import it: {import_} {path} format=nanogpt dtype=uint16 (uint32 above 65,536 ids) ..."
_WITHOUT_HEADER = "write the tokens alone: numpy.load('{path}').astype('uint16').tofile('train.bin')"
# What a file is and how to use it, by suffix, and by first bytes. Fields are filled in by `_words`.
_SUFFIXES = {
    ".arrow": (_ARROW, _TO_PARQUET),
    ".mds": (_MDS, _FROM_MDS),
    ".ds": ("a token file of datatrove", _IMPORT.replace("{format}", "datatrove")),
    ".idx": ("a token file of Megatron", _IMPORT.replace("{format}", "megatron")),
    ".bin": ("a token file", _IMPORT.replace("{format}", "nanogpt, llmc or megatron")),
    ".npy": ("a token file without a header, as OLMo-core writes it", _RAW),
    ".npz": ("an archive of NumPy arrays", _WITHOUT_HEADER),
}
_STARTS = {
    b"\x93NUMPY": ("a NumPy array with a header", _WITHOUT_HEADER),
    b"MMIDIDX": ("the index of a Megatron dataset", _IMPORT.replace("{format}", "megatron")),
    b"PAR1": ("a Parquet file", "tokenize it: {preprocess} input={path} tokenizer=... output=..."),
    b"ARROW1": (_ARROW, _TO_PARQUET),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\x1f\x8b\x08": ("compressed by gzip", "decompress it"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it"),
    b"\xfd7zXZ\x00": ("compressed by xz", "decompress it"),
}
_START = max(map(len, _STARTS))


def refuse_folder(key: str, folder: Path) -> None:
    """Raise ConfigError, naming `key`, for the folder of a dataset of another tool."""
    names = {each.name for each in folder.iterdir()}
    suffixes = {Path(name).suffix for name in names} | {Path(name).with_suffix("").suffix for name in names}
    if "dataset_dict.json" in names:
        raise _refusal(key, folder, _ARROW, _TO_PARQUET, split="['train']")
    if {"state.json", "dataset_info.json"} <= names:
        raise _refusal(key, folder, _ARROW, _TO_PARQUET)
    if "index.json" in names and ".mds" in suffixes:
        raise _refusal(key, folder, _MDS, _FROM_MDS)
    if "index.json" in names and any(name.startswith("chunk-") and name.endswith(".bin") for name in names):
        raise _refusal(key, folder, _LITDATA, _FROM_LITDATA)


def refuse_suffix(key: str, file: Path) -> None:
    """Raise ConfigError, naming `key`, for a file that is not text by its suffix; a NumPy array is told by its
    header."""
    if (found := _SUFFIXES.get(file.suffix)) is not None and file.is_file():
        if file.suffix == ".npy":
            refuse_start(key, file)
        raise _refusal(key, file, *found)


def refuse_start(key: str, file: Path) -> None:
    """Raise ConfigError, naming `key`, for a file that begins as one of another format and not with tokens."""
    with open_regular(file) as opened:
        start = opened.read(_START)
    for magic, found in _STARTS.items():
        if start.startswith(magic):
            raise _refusal(key, file, *found)


def _refusal(key: str, path: Path, what: str, fix: str, split: str = "") -> ConfigError:
    place = path.parent if path.suffix in (".arrow", ".mds") and path.is_file() else path
    fields = {"import_": f"{command('data')} import", "preprocess": command("preprocess")}
    return ConfigError(f"{key}: {path} is {what}; {fix.format(path=place, split=split, **fields)}")
