"""Rows of a translated DeepSpeed JSON, one per key, and type-checked access to its sections."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gptlite.config.saved import override_value
from gptlite.errors import did_you_mean

AUTO = "auto"
ABSENT = "(not given)"
OFF = "off"
LARGEST = 1e30  # largest absolute value of a number; excludes infinity and NaN


class Verdict(Enum):
    """Treatment of a DeepSpeed key.

    `taken`: translated to an equivalent setting. `no_op`: has no effect in gptlite. `refused`: invalid, or would change
    results and has no equivalent.
    """

    taken = "taken"
    no_op = "no-op"
    refused = "refused"


@dataclass(frozen=True)
class Row:
    """Verdict on one key, the reason for the verdict, and the overrides that replace the key."""

    key: str
    value: Any
    verdict: Verdict
    reason: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """`key=value`; for a section the key alone, and for an absent key `key (not given)`."""
        if isinstance(self.value, dict):
            return self.key
        short = f"{self.value:g}" if isinstance(self.value, float) else ""
        value = short if short and float(short) == self.value else f"{json.dumps(self.value):.200}"
        return f"{self.key} {ABSENT}" if self.value is ABSENT else f"{self.key}={value}"


class Kind(Enum):
    """JSON type of a key's value. The value of a member describes it in error messages."""

    flag = "true or false"
    integer = "a whole number"
    count = "a whole number of at least 1"
    number = "a finite number"
    text = "a string"
    section = "an object {...}"
    pair = "a pair of numbers [beta1, beta2]"
    anything = "anything"

    def read(self, value: Any) -> Any:
        """Return the value. A float such as 5e8 becomes an int if the kind is an integer. Raises ValueError for a value
        of another type."""
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        match self:
            case Kind.integer | Kind.count:
                fits = number and value == int(value) and (self is Kind.integer or value >= 1)
                value = int(value) if fits else value
            case Kind.number:
                fits = number
            case Kind.pair:
                fits = isinstance(value, list) and len(value) == 2
                for each in value if isinstance(value, list) else ():
                    Kind.number.read(each)
            case Kind.anything:
                fits = True
            case _:
                fits = isinstance(value, {Kind.flag: bool, Kind.text: str, Kind.section: dict}[self])
        if not fits:
            raise ValueError(self.value)
        return value


@dataclass(frozen=True)
class Sets:
    """Rule for a key that has an equivalent: the name of gptlite's key, which gets the same value."""

    key: str


@dataclass(frozen=True)
class Only:
    """Rule for a key of which only `values` match gptlite's behaviour. Other values are refused."""

    values: tuple[Any, ...]
    refusal: str
    reason: str = "as in gptlite"


Rule = str | Sets | Only  # a string is the reason why the key has no effect


class Section:
    """Object of the JSON, read key by key. An invalid value is refused; `close` refuses the keys that were not read."""

    def __init__(self, content: Mapping[str, Any], path: str, rows: list[Row]) -> None:
        self.content, self.path, self.rows = content, path, rows
        self.known: set[str] = set()
        self._values: dict[str, Any] = {}

    def get(self, name: str, kind: Kind) -> Any:
        """Return the value of a key; None if it is absent, null, or refused for its type. "auto" is returned as is."""
        self.known.add(name)
        if name not in self._values:
            self._values[name] = self._read(name, kind)
        return self._values[name]

    def _read(self, name: str, kind: Kind) -> Any:
        value = self.content.get(name)
        if name in self.content and value is None:
            self.no_op(name, "null: DeepSpeed's default")
        elif value == AUTO:
            self.no_op(name, "gptlite's preset applies")
        elif value is not None:
            try:
                return kind.read(value)
            except ValueError:
                self.refuse(name, f"must be {kind.value}")
        return value if value == AUTO else None

    def value(self, name: str, kind: Kind) -> Any:
        """Return the value of a key, like `get`, but None for "auto"."""
        value = self.get(name, kind)
        return None if value == AUTO else value

    def section(self, name: str) -> Section | None:
        """Return a nested object; None if it is absent or not an object."""
        content = self.value(name, Kind.section)
        return None if content is None else Section(content, self.full(name), self.rows)

    def full(self, name: str) -> str:
        """Return a key's path from the root."""
        return f"{self.path}.{name}" if self.path else name

    def take(self, name: str, reason: str = "", /, **overrides: Any) -> None:
        """Add a row for a key that has an equivalent in gptlite. `overrides` are the equivalent settings, with `__` in
        place of each `.` in a key."""
        given = tuple(f"{key.replace('__', '.')}={override_value(value)}" for key, value in overrides.items())
        self._add(name, Verdict.taken, reason, given)

    def no_op(self, name: str, reason: str) -> None:
        """Add a row for a key that has no effect in gptlite."""
        self._add(name, Verdict.no_op, reason)

    def refuse(self, name: str, reason: str) -> None:
        """Add a row for a key that is refused."""
        self._add(name, Verdict.refused, reason)

    def apply(self, rules: Mapping[str, tuple[Kind, Rule]]) -> None:
        """Add the rows of keys whose rules do not depend on other keys."""
        for name, (kind, rule) in rules.items():
            value = self.value(name, kind)
            if value is None:
                continue
            match rule:
                case Sets(key):
                    self.take(name, **{key.replace(".", "__"): value})
                case Only(values, refusal, reason):
                    self.no_op(name, reason) if value in values else self.refuse(name, refusal)
                case str():
                    self.no_op(name, rule)

    def close(self) -> None:
        """Refuse keys that were not read, as they may be misspelled."""
        for name in self.content:
            if name not in self.known:
                self.refuse(name, f"is not a key of DeepSpeed 0.19{did_you_mean(name, self.known)}")

    def _add(self, name: str, verdict: Verdict, reason: str, overrides: tuple[str, ...] = ()) -> None:
        value = self.content.get(name, ABSENT)
        self.rows.append(Row(self.full(name), value, verdict, reason, overrides))


def paths(content: Any, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all keys, in the order of the file."""
    for name, value in content.items() if isinstance(content, dict) else ():
        yield prefix + name
        yield from paths(value, f"{prefix}{name}.")


def in_file_order(rows: list[Row], content: dict[str, Any]) -> list[Row]:
    """Sort rows by the position of their keys in the file. Rows of absent keys come last in their section."""
    places = {path: place for place, path in enumerate(paths(content))}

    def place(row: Row) -> float:
        if row.key in places:
            return places[row.key]
        section = f"{row.key.rpartition('.')[0]}."
        return max((each + 0.5 for path, each in places.items() if path.startswith(section)), default=math.inf)

    return sorted(rows, key=place)
