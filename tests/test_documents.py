"""JSON and YAML of others: refused by position, key and value before anything uses them."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from gptlite import limits
from gptlite.documents import (
    Between,
    Count,
    Digest,
    DocumentError,
    checked,
    parse_json,
    read_bytes,
    read_json,
    refuse_yaml,
)
from gptlite.errors import ConfigError


class Open(TypedDict):
    name: str
    kind: NotRequired[Literal["a", "b"] | None]


@dataclass
class Closed:
    step: Count
    ranges: list[Annotated[list[Count], Between(2, 2)]] = field(default_factory=list)
    inner: dict[str, Open] = field(default_factory=dict)
    rate: Annotated[float, Between(-1e300, 1e300)] | None = None
    hash: Digest | None = None


VALID = {
    "step": 1,
    "ranges": [[0, 2]],
    "inner": {"x": {"name": "é", "kind": "a", "other": [1]}},
    "rate": 1,
    "hash": None,
}


def test_a_valid_document_is_an_instance_with_its_values():
    found = parse_json(json.dumps(VALID), Closed)
    assert found == Closed(1, [[0, 2]], {"x": {"name": "é", "kind": "a", "other": [1]}}, 1)  # type: ignore[typeddict-unknown-key]
    assert parse_json(b'\xef\xbb\xbf{"step": 0}', Closed) == Closed(0)
    assert parse_json('{"step": NaN, "x": 1e999}', dict[str, float])["x"] == float("inf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": -1}, "step is -1, not 0 or more"),
        ({"step": True}, "step is true, not an integer"),
        ({"step": 1.0}, "step is 1.0, not an integer"),
        ({"step": 2**63}, "step is an integer of 19 digits, not an integer"),
        ({"step": [1]}, r"step is \[1\], not an integer"),
        ({"ranges": [[0, 2], [1]]}, r"ranges\[1\] has the length 1, not 2 to 2"),
        ({"ranges": [[0, "2"]]}, r'ranges\[0\]\[1\] is "2", not an integer'),
        ({"ranges": {}}, "ranges is {}, not an array"),
        ({"inner": {"x": {}}}, "inner.x.name is missing"),
        ({"inner": {"x": {"name": "", "kind": "c"}}}, 'inner.x.kind is "c", not "a" or "b"'),
        ({"inner": {"\x1b[2J": 1}}, r'inner."\\u001b\[2J" is 1, not an object'),
        ({"rate": float("nan")}, "rate is NaN, not"),
        ({"rate": 10**400}, "it has an integer of 401 digits, more than 40"),
        ({"hash": "A" * 64}, 'hash is "A+", not a SHA-256 hash'),
        ({"steps": 1}, "steps is not a known key"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(changes: dict[str, Any], words: str):
    with pytest.raises(DocumentError, match=words):
        parse_json(json.dumps(VALID | changes), Closed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is not JSON: line 1, column 1"),
        ('{"a": 1,\n "b": }', "it is not JSON: line 2, column 7"),
        ('{"a": 1, "b": 2, "a": 3}', 'the key "a" is given twice'),
        ('["\\ud83d"]', "half of a surrogate pair"),
        ("1" * 5000, "an integer of 5000 digits, more than 40"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"a": ' + "[" * 66 + "]" * 66 + "}", "nested more than 64 deep"),
        (b'{"a": "\xff"}', "it is not UTF-8 text, at byte 7"),
        ("[]", r"it is \[\], not an object"),
    ],
)
def test_what_is_not_json_is_refused(text: str | bytes, words: str):
    with pytest.raises(DocumentError, match=words):
        parse_json(text, dict[str, Any])


def test_a_pair_of_surrogates_is_a_character():
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"


def test_a_file_is_regular_and_of_bounded_size(tmp_path: Path):
    (tmp_path / "large").write_bytes(b"1" * 11)
    assert read_bytes(tmp_path / "large", 11) == b"1" * 11
    with pytest.raises(DocumentError, match="it is larger than 10 bytes"):
        read_bytes(tmp_path / "large", 10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is a pipe, not a regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x [1]\nb: *x", "line 1 has an anchor"),
        ("a: [1\n", "it is not YAML: line 2"),
        ("a: \x00", "it is not YAML"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ("#" * (limits.YAML_BYTES + 1), "more than 1,048,576 characters"),
    ],
)
def test_yaml_that_multiplies_or_nests_is_refused(text: str, words: str):
    with pytest.raises(DocumentError, match=words):
        refuse_yaml(text)


def test_a_billion_laughs_take_no_time():
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    started = time.monotonic()
    with pytest.raises(DocumentError):
        refuse_yaml("\n".join(lines))
    assert time.monotonic() - started < 1


def test_an_alternative_of_the_values_type_gives_the_reason():
    with pytest.raises(DocumentError, match="it is 11, not 0 to 10"):
        checked(11, str | Annotated[int, Between(0, 10)] | None)


@pytest.mark.parametrize(("key", "shown"), [(1.5, "1.5"), (None, "null"), (True, "true")])
def test_a_key_of_yaml_that_is_not_text_is_refused(key: Any, shown: str):
    with pytest.raises(DocumentError, match=f"a.b has the key {shown}, which is not text"):
        checked({key: 1.0}, dict[str, float], "a.b")
