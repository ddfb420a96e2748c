"""Damaged and hostile versions of valid files, drawn by Hypothesis."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import strategies as st

DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]
# Values in the place of others. Numbers are at the limits of types, and strings are those that break printing or paths.
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 255, 65536, 10**6, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63)),
    *(10**30, 10**400, 0.0, -0.5, 1.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "0", "-1", "1e5", "null", "é漢\U0001f600", "\0", "\x1b[2J\r\n", "\ud800", "..", "../../x"),
    *("/etc/passwd", "a" * 1000, "${oc.env:HOME}", "${run.dir}", "[1,2", "{a: b}", "<b>&'\"", "%s%n{0}", "\u202etxt"),
    *([], {}, [None], [[]], [0, 1], [1, 0], {"": 0}, {"a": {"b": []}}, DEEP),
]  # fmt: skip
MOST_BYTES = 20  # inserted at a time
Path = tuple[Any, ...]


def paths(value: Any, prefix: Path = ()) -> Iterator[Path]:
    """Yield the path of every value inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*prefix, key)
        yield from paths(each, (*prefix, key))


def at(value: Any, path: Path) -> Any:
    """Return the value at a path."""
    for key in path:
        value = value[key]
    return value


@st.composite
def trees(draw: st.DrawFn, valid: Any) -> Any:
    """Draw a copy of a tree of dicts and lists with one to three changes."""
    tree = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        places = list(paths(tree))
        if not places:
            break
        path = draw(st.sampled_from(places))
        parent, key = at(tree, path[:-1]), path[-1]
        match draw(st.integers(0, 5)):
            case 0 | 1:
                parent[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
            case 2:
                parent[key] = copy.deepcopy(at(tree, draw(st.sampled_from(places))))
            case 3:
                del parent[key]
            case 4 if isinstance(parent, dict):
                parent[draw(st.sampled_from([each for each in HOSTILE if isinstance(each, str)]))] = parent.pop(key)
            case _ if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(parent[key]))
            case _:
                parent[key] = [parent[key]]
    return tree


@st.composite
def octets(draw: st.DrawFn, valid: bytes) -> bytes:
    """Draw a copy of a file with one to four changes of its bytes."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        stop = min(len(content), start + draw(st.sampled_from((1, 1, 2, 4, 8, 64, 1 << 20))))
        match draw(st.integers(0, 5)):
            case 0 if start < len(content):
                content[start] ^= 1 << draw(st.integers(0, 7))
            case 1:
                content[start:start] = draw(st.binary(min_size=1, max_size=MOST_BYTES))
            case 2:
                content[start:stop] = b""
            case 3:
                content[start:stop] = draw(st.sampled_from((b"\xff", b"\0", b"\x7f", b"\x80"))) * (stop - start)
            case 4:
                other = draw(st.integers(0, len(content)))
                content[start:start] = content[other : other + draw(st.integers(1, 64))]
            case _:
                content[start:stop] = draw(st.sampled_from(EDGES)).to_bytes(8, "little")[: max(stop - start, 1)]
    return bytes(content)


EDGES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def json_files(valid: Any) -> st.SearchStrategy[bytes]:
    """Draw JSON files, most of which are still JSON."""
    text = trees(valid).map(lambda tree: json.dumps(tree).encode())
    return st.one_of(text, text, text, text.flatmap(octets))


def yaml_files(valid: Any) -> st.SearchStrategy[bytes]:
    """Draw YAML files, most of which are still YAML."""
    text = trees(valid).map(lambda tree: yaml.safe_dump(_printed(tree), sort_keys=False).encode())
    return st.one_of(text, text, text, text.flatmap(octets))


def json_lines(valid: list[Any]) -> st.SearchStrategy[bytes]:
    """Draw files with a JSON value in each line."""
    text = trees(valid).map(lambda tree: "".join(json.dumps(each) + "\n" for each in tree).encode())
    return st.one_of(text, text, text, text.flatmap(octets))


def _printed(tree: Any) -> Any:
    """Return a tree without shared lists, which would be printed as aliases, and without strings that YAML refuses."""
    if isinstance(tree, dict):
        return {str(key).encode(errors="replace").decode(): _printed(each) for key, each in tree.items()}
    if isinstance(tree, list):
        return [_printed(each) for each in tree]
    return tree.encode(errors="replace").decode() if isinstance(tree, str) else tree
