"""Keys and values of Hydra overrides."""

from collections.abc import Iterable


def key_of(override: str) -> str:
    """Return the key of an override, without the prefixes + and ~."""
    return override.partition("=")[0].lstrip("+~")


def values_of(overrides: Iterable[str]) -> dict[str, str]:
    """Return the values of overrides by key. Of several with the same key, the last one counts."""
    return {key_of(each): each.partition("=")[2] for each in overrides}
