"""Settings that determine the bytes of a prepared folder. The folder holds a copy, and a rerun must match it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from gptlite.documents import Count, read_json
from gptlite.errors import ConfigError
from gptlite.satellites.preprocess.blocks import BLANK_LINES, Cutting
from gptlite.satellites.preprocess.inputs import Source, find_sources

FILE = "preprocess.json"
_VERSION = 1  # of the output format; preprocessing begun by another version cannot be resumed


@dataclass(frozen=True)
class PreprocessSettings:
    """Sources, rules for cutting them into documents, fingerprint of the tokenizer, and the held-out fraction."""

    sources: list[Source]
    cutting: Cutting
    tokenizer: str
    validation_fraction: float

    def as_json(self) -> dict[str, Any]:
        """Return the settings as saved. The keys are those of the command line."""
        return {
            "version": _VERSION,
            "tokenizer": self.tokenizer,
            "field": self.cutting.column,
            "separator": self.cutting.separator,
            "max_record_bytes": self.cutting.max_record_bytes,
            "validation_fraction": self.validation_fraction,
            "input": [asdict(source) for source in self.sources],
        }


class _Input(TypedDict):
    path: str
    format: str


class _Saved(TypedDict):
    version: Count
    input: list[_Input]


def make_settings(arguments: Any) -> PreprocessSettings:
    """Return the settings of a command line, with `tokenizer` left empty. Raises ConfigError if a value is invalid.

    `arguments` has the keys input, format, field, separator, max_record_bytes and validation_fraction.
    """
    if not 0 <= arguments.validation_fraction < 1:
        value = arguments.validation_fraction
        raise ConfigError(f"validation_fraction={value} must be at least 0 and below 1, e.g. 0.005")
    if not 1 <= arguments.max_record_bytes < 1 << 31:
        raise ConfigError(f"max_record_bytes={arguments.max_record_bytes} must be at least 1 and below 2 GiB")
    if not arguments.field:
        raise ConfigError("field= is empty; give the name of the JSON field or Parquet column with the text")
    sources = find_sources(arguments.input, arguments.format)
    literal = arguments.separator
    if arguments.separator != BLANK_LINES:
        for escape, character in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\\0", "\0")):
            literal = literal.replace(escape, character)
    if arguments.separator and not any(source.format == "text" for source in sources):
        raise ConfigError(f"separator={arguments.separator} is for text, and input={arguments.input} has no text files")
    return PreprocessSettings(
        sources, Cutting(arguments.field, literal, arguments.max_record_bytes), "", arguments.validation_fraction
    )


def read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings saved in `path`, in the form of `as_json`; None if they are missing or not readable."""
    try:
        return read_json(path, _Saved)
    except (OSError, ValueError):
        return None


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe the first difference between saved settings; "" if they are equal."""
    for key in new:
        if key == "input":
            if said := _input_difference(old["input"], new["input"]):
                return said
        elif old.get(key) != new[key]:
            return f"{key} was {_short(old.get(key))}, now it is {_short(new[key])}"
    return ""


def _input_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    for then, now in zip(old, new, strict=False):
        if then["path"] != now["path"]:
            return f"input was {then['path']}, now it is {now['path']}"
        if then["format"] != now["format"]:
            return f"format of input {now['path']} was {then['format']}, now it is {now['format']}"
        if then != now:
            return f"input {now['path']} has changed"
    return f"number of input files was {len(old)}, now it is {len(new)}" if len(old) != len(new) else ""


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else repr(value)
