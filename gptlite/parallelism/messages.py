"""Encoding of what ranks send each other: JSON, never pickle, so that no message can run code.

Values are None, bool, int, float, str, bytes, Path, and lists, tuples and dicts of these. Exceptions are those of
ERRORS with such arguments. Anything else stays on its rank.
"""

from __future__ import annotations

import base64
import builtins
import json
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from gptlite.errors import ConfigError

# Exceptions that ranks may raise for each other, by name; others arrive as a RuntimeError. See `passed_on`.
ERRORS: dict[str, type[BaseException]] = {
    **{
        name: value
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException) and not issubclass(value, BaseExceptionGroup)
    },
    "ConfigError": ConfigError,
}
E = TypeVar("E", bound=type[BaseException])
PLAIN = (type(None), bool, int, float, str)


def passed_on(kind: E) -> E:
    """Class decorator: let ranks raise this exception for each other. Its `__reduce__` gives the arguments."""
    ERRORS[kind.__name__] = kind
    return kind


class MessageError(ValueError):
    """Error for a message that `encode` has not written."""


def encode(value: Any) -> bytes:
    """Return a value as JSON. Raises TypeError for a type that no message has."""
    return json.dumps(_tagged(value)).encode()


def decode(message: bytes) -> Any:
    """Return the value of an encoded message. Raises MessageError."""
    try:
        return _untagged(json.loads(message))
    except MessageError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"a message between ranks is damaged: {error}") from None


def encode_error(error: BaseException) -> bytes:
    """Return an exception, or b"" if it is not one of ERRORS or has arguments that no message has."""
    kind = type(error)
    if ERRORS.get(kind.__name__) is not kind:
        return b""
    try:
        return encode((kind.__name__, error.__reduce__()[1]))
    except TypeError:
        return b""


def decode_error(message: bytes) -> BaseException | None:
    """Return the exception of a message from `encode_error`; None without one."""
    if not message:
        return None
    match decode(message):
        case (str(name), tuple(arguments)) if name in ERRORS:
            return ERRORS[name](*arguments)
    raise MessageError("a message between ranks holds no known exception")


def _tagged(value: Any) -> Any:
    """Return a value with the types that JSON lacks as one-key objects, e.g. {"tuple": [...]}."""
    if isinstance(value, PLAIN) and not isinstance(value, Enum):
        return value
    if type(value) is list:
        return [_tagged(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [_tagged(each) for each in value]}
    if type(value) is dict:
        return {"dict": [[_tagged(key), _tagged(each)] for key, each in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise TypeError(f"ranks cannot send each other a {type(value).__module__}.{type(value).__qualname__}")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(each) for each in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("tuple", list(items))]:
            return tuple(_untagged(each) for each in items)
        case [("dict", list(items))]:
            return {_untagged(key): _untagged(each) for key, each in items}
        case [("path", str(text))]:
            return Path(text)
        case [("bytes", str(text))]:
            return base64.b64decode(text, validate=True)
    raise MessageError("a message between ranks has an unknown type")
