"""The errors a user can cause. Each is one line that names the key, its value and the fix."""

from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration that is refused before anything is written or started. Exit code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest known word, or nothing."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
