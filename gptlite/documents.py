"""JSON and YAML documents that others may have made: limits before parsing, types and ranges before use.

A document is described by a type: `int`, `float`, `str`, `bool`, `None`, `Any`, `list[T]`, `dict[str, T]`, `A | B`,
`Literal["a", "b"]`, `Annotated[int, Between(0, 9)]`, a dataclass, or a TypedDict. A dataclass refuses other keys, and
the result has an instance of it. A TypedDict ignores them. An integer without a range has 64 bits. A number may be NaN
or infinite, which Python reads and writes, unless it has a range.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from gptlite import limits
from gptlite.files import open_regular

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NAMES: dict[Any, str] = {
    int: "an integer", float: "a number", str: "a string", bool: "true or false", NoneType: "null", list: "an array",
    dict: "an object",
}  # fmt: skip


class DocumentError(ValueError):
    """Reason why a document is refused: the position or the key, the value, and what is expected."""


@dataclass(frozen=True)
class Between:
    """Range of a number, with both ends, or of the length of a string or an array."""

    least: float
    most: float

    def __call__(self, value: Any, key: str) -> None:
        """Raise DocumentError for a value outside the range."""
        size = value if isinstance(value, int | float) else len(value)
        if not self.least <= size <= self.most:
            what = "is" if size is value else "has the length"
            range_ = f"{self.least:g} to {self.most:,}" if self.most < limits.INTEGER else f"{self.least:g} or more"
            raise DocumentError(f"{key} {what} {shown(size)}, not {range_}")


@dataclass(frozen=True)
class Matching:
    """Pattern that a whole string matches; `words` describe it in messages."""

    pattern: str
    words: str

    def __call__(self, value: str, key: str) -> None:
        """Raise DocumentError for a string that does not match."""
        if not re.fullmatch(self.pattern, value):
            raise DocumentError(f"{key} is {shown(value)}, not {self.words}")


Count = Annotated[int, Between(0, limits.INTEGER)]
Size = Annotated[int, Between(1, limits.SIZE)]
Digest = Annotated[str, Matching("[0-9a-f]{64}", "a SHA-256 hash")]


def read_bytes(path: Path, most: int = limits.DOCUMENT_BYTES) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises OSError or DocumentError."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DocumentError(f"it is larger than {most:,} bytes, the limit for such a file")
    return content


def read_json(path: Path, kind: Any = Any, most: int = limits.DOCUMENT_BYTES) -> Any:
    """Return the content of a JSON file, checked by `kind`. Raises OSError or DocumentError."""
    return parse_json(read_bytes(path, most), kind)


def read_text(path: Path, most: int = limits.DOCUMENT_BYTES) -> str:
    """Return the text of a UTF-8 file of at most `most` bytes. Raises OSError or DocumentError."""
    return decoded(read_bytes(path, most))


def decoded(content: bytes) -> str:
    """Return the text of UTF-8 bytes. Raises DocumentError."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"it is not UTF-8 text, at byte {error.start}") from None


def parse_json(content: bytes | str, kind: Any = Any) -> Any:
    """Return the value of a JSON text, checked by `kind`. Raises DocumentError.

    A key that is given twice is refused, as is a character that UTF-8 cannot encode (half of a surrogate pair).
    """
    text = decoded(content) if isinstance(content, bytes) else content
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise DocumentError(f"it is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeEncodeError:
        raise DocumentError("it has half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise DocumentError(f"it is nested more than {limits.DEPTH} deep") from None
    return checked(value, kind)


def refuse_yaml(text: str) -> None:
    """Raise DocumentError for a YAML text that is not YAML, nests too deeply, is too long, or has tags, anchors or
    aliases, by which a few lines can stand for gigabytes."""
    import yaml

    if len(text) > limits.YAML_BYTES:
        raise DocumentError(f"it has more than {limits.YAML_BYTES:,} characters")
    depth = 0
    try:
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if getattr(event, "anchor", None):
                raise DocumentError(f"line {event.start_mark.line + 1} has an anchor or an alias; write the value out")
            if getattr(event, "tag", None):
                raise DocumentError(f"line {event.start_mark.line + 1} has the tag {shown(event.tag)}; leave it out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > limits.DEPTH:
                raise DocumentError(f"it is nested more than {limits.DEPTH} deep")
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise DocumentError(f"it is not YAML: {line}{error.problem}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise DocumentError(f"it is not YAML: {str(error).splitlines()[0]}") from None


def checked(value: Any, kind: Any, key: str = "") -> Any:
    """Return `value` if it is of the type `kind`, with instances of the dataclasses in it. Raises DocumentError.

    `key` names the value in messages.
    """
    if kind is Any:
        _refuse_deep(value)
        return value
    origin = get_origin(kind)
    if origin is Annotated:
        base, *rules = get_args(kind)
        value = checked(value, base, key)
        for rule in rules:
            rule(value, key or "it")
        return value
    if origin in (Union, UnionType):
        return _one_of(value, get_args(kind), key)
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in get_args(kind)):
            raise DocumentError(f"{key or 'it'} is {shown(value)}, not {' or '.join(map(shown, get_args(kind)))}")
        return value
    if is_dataclass(kind) or is_typeddict(kind):
        return _structure(value, kind, key)
    if not _is(value, origin or kind):
        raise DocumentError(f"{key or 'it'} is {shown(value)}, not {_NAMES[origin or kind]}")
    if origin is list:
        (inner,) = get_args(kind)
        return [checked(each, inner, f"{key}[{n}]") for n, each in enumerate(value)]
    if origin is dict:
        names, inner = get_args(kind)
        if names is str and (wrong := [name for name in value if not isinstance(name, str)]):  # YAML has such keys
            raise DocumentError(f"{key or 'it'} has the key {shown(wrong[0])}, which is not text")
        return {name: checked(each, inner, _below(key, name)) for name, each in value.items()}
    return value


def shown(value: Any) -> str:
    """Return the JSON of a value for messages, cut to 80 characters; what a long container or integer is in words."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > limits.INTEGER:
        return f"an integer of {int(math.log10(abs(value))) + 1} digits"
    if isinstance(value, str):
        return f"{json.dumps(value, ensure_ascii=not value.isprintable()):.80}"
    try:
        text = json.dumps(value, default=repr)
    except (RecursionError, ValueError):
        text = ""
    return _NAMES[type(value)] if isinstance(value, dict | list) and not 0 < len(text) <= 40 else f"{text:.80}"


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, float) or (type(value) is int and abs(value) <= 1e300)
    if kind is int:
        return type(value) is int and abs(value) <= limits.INTEGER
    return type(value) is kind


def _one_of(value: Any, kinds: Sequence[Any], key: str) -> Any:
    reasons = []
    for kind in kinds:
        try:
            return checked(value, kind, key)
        except DocumentError as error:
            # The reason of the alternative with the value's type is the most specific one.
            base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            reasons.append((kind is NoneType, not _same_type(value, base), str(error)))
    raise DocumentError(min(reasons)[2])


def _same_type(value: Any, kind: Any) -> bool:
    if is_dataclass(kind) or is_typeddict(kind):
        return isinstance(value, dict)
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and isinstance(value, origin)


def _structure(value: Any, kind: Any, key: str) -> Any:
    if not isinstance(value, dict):
        raise DocumentError(f"{key or 'it'} is {shown(value)}, not an object")
    hints, required = _hints(kind)
    if missing := [name for name in required if name not in value]:
        raise DocumentError(f"{_below(key, missing[0])} is missing")
    known = {name: checked(value[name], hints[name], _below(key, name)) for name in hints if name in value}
    if is_typeddict(kind):
        return value | known
    if unknown := [name for name in value if name not in hints]:
        raise DocumentError(f"{_below(key, unknown[0])} is not a known key")
    return kind(**known)


@cache
def _hints(kind: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    hints = get_type_hints(kind, include_extras=True)
    if is_typeddict(kind):
        # `__required_keys__` is wrong in modules with `from __future__ import annotations`.
        needed = [
            name
            for name, hint in hints.items()
            if get_origin(hint) is Required or (kind.__total__ and get_origin(hint) is not NotRequired)
        ]
        return {
            name: get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint
            for name, hint in hints.items()
        }, tuple(needed)
    stored = [each for each in fields(kind) if each.init]
    required = [each.name for each in stored if each.default is MISSING and each.default_factory is MISSING]
    return {each.name: hints[each.name] for each in stored}, tuple(required)


def _refuse_deep(value: Any) -> None:
    """Raise DocumentError if a value is nested too deeply for functions that call themselves."""
    level: list[Iterable[Any]] = [[value]]
    for _ in range(limits.DEPTH + 1):
        level = [
            each.values() if isinstance(each, dict) else each
            for group in level
            for each in group
            if isinstance(each, dict | list)
        ]
        if not level:
            return
    raise DocumentError(f"it is nested more than {limits.DEPTH} deep")


def _integer(text: str) -> int:
    if len(text) > limits.DIGITS:
        raise DocumentError(f"it has an integer of {len(text)} digits, more than {limits.DIGITS}")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise DocumentError(f"the key {shown(twice)} is given twice; remove one")
    return content


def _below(key: str, name: str) -> str:
    name = name if name.isprintable() and len(name) <= 80 else shown(name)
    return f"{key}.{name}" if key else name
