"""Reading of a DeepSpeed JSON: comments and trailing commas are accepted, duplicate keys are not."""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from gptlite.errors import ConfigError

COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def read(path: str, key: str = "deepspeed=") -> dict[str, Any]:
    """Return the content of the file. Raises a one-line ConfigError with the position of a syntax error.

    The message begins with `key` and the path.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{key}{path} cannot be read: {error.strerror}; give the path of a JSON file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}{path} is not a UTF-8 text file: {error.reason}") from error
    try:
        content = json.loads(_plain(text), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{key}{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{key}{path} has a {type(content).__name__} at its root, not an object {{...}}")
    return content


def _plain(text: str) -> str:
    """Replace comments and trailing commas by spaces, so that error positions are still those in the file."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return TRAILING_COMMA.sub(blank, COMMENT.sub(blank, text))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key} is given twice; remove one")
        content[key] = value
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON; give a number")
