"""Reading of a DeepSpeed JSON: comments and trailing commas are accepted, duplicate keys are not."""

import re
from pathlib import Path
from typing import Any

from gptlite.documents import DocumentError, parse_json, read_text
from gptlite.errors import ConfigError

COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def read(path: str, key: str = "deepspeed=") -> dict[str, Any]:
    """Return the content of the file. Raises a one-line ConfigError with the position of a syntax error.

    The message begins with `key` and the path.
    """
    try:
        return parse_json(_plain(read_text(Path(path).expanduser())), dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{key}{path} cannot be read: {error.strerror}; give the path of a JSON file") from error
    except DocumentError as error:
        raise ConfigError(f"{key}{path} cannot be used: {error}") from error


def _plain(text: str) -> str:
    """Replace comments and trailing commas by spaces, so that error positions are still those in the file."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return TRAILING_COMMA.sub(blank, COMMENT.sub(blank, text))
