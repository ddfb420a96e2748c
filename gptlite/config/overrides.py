"""Keys and values of Hydra overrides: values are quoted and unquoted here, and nowhere else."""

import re
from collections.abc import Iterable

# Text that Hydra reads as it is, unless all of it is a number or another value.
PLAIN = re.compile(r"[\w./:+@-]+", re.ASCII)
OTHER = re.compile(r"null|true|false|[+-]?(inf|nan|[0-9_.]+(e[+-]?[0-9_]+)?)", re.IGNORECASE)
NAMELESS = re.compile(rf"(?!null){OTHER.pattern}|[\[{{].*", re.IGNORECASE)  # values other than null that name no preset
EXPONENT = re.compile(r"[0-9]+(\.[0-9]*)?[eE][+]?[0-9]+")
INTERPOLATION = re.compile(r"(\\*)\$\{")


def key_of(override: str) -> str:
    """Return the key of an override, without the prefixes + and ~."""
    return override.partition("=")[0].lstrip("+~")


def values_of(overrides: Iterable[str]) -> dict[str, str]:
    """Return the values of overrides by key, unquoted. Of several with the same key, the last one counts."""
    return {key_of(each): unquoted(each.partition("=")[2]) for each in overrides}


def hydra_value(text: str) -> str:
    """Format a string as the value of an override, with quotes if Hydra would not read the same string without them."""
    if PLAIN.fullmatch(text) and not OTHER.fullmatch(text):
        return text
    text = re.sub(r"(\\+)(?='|\Z)", r"\1\1", escaped(text))  # elsewhere, Hydra reads a backslash in quotes as it is
    return "'" + text.replace("'", "\\'") + "'"


def whole_number(value: str) -> str:
    """Return the value, with whole numbers such as 1e3 or 2.5e6 written as 1000 and 2500000, also in `1e3,2e3`."""
    return ",".join(map(_digits, value.split(","))) if EXPONENT.search(value) else value


def _digits(text: str) -> str:
    if EXPONENT.fullmatch(text.strip()) and (number := float(text)).is_integer() and number < 2**53:
        return str(int(number))
    return text


def command_value(text: str) -> str:
    """Format a string as the value of an argument of a command other than train, which reads it literally, except for a
    value in quotes."""
    return hydra_value(text) if text[:1] in ("'", '"') else text


def escaped(text: str) -> str:
    """Return the string that OmegaConf resolves to `text`, even if the text has the form of an interpolation."""
    return INTERPOLATION.sub(r"\1\1\\${", text)


def unquoted(value: str) -> str:
    """Return the string that Hydra reads in the value of an override.

    Values that Hydra cannot read, and values of other types, such as numbers and lists, are returned as they are.
    """
    if PLAIN.fullmatch(value):
        return value
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        text = OverridesParser.create().parse_override(f"key={value}").value()
    except HydraException:
        return value
    if not isinstance(text, str) or any(len(found[1]) % 2 == 0 for found in INTERPOLATION.finditer(text)):
        return value
    return INTERPOLATION.sub(lambda found: "\\" * (len(found[1]) // 2) + "${", text)
