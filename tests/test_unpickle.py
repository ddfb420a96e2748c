"""Pickles that others made give plain values and objects of named classes, and run, change and hang nothing."""

import pickle
import struct
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from gptlite.checkpoint.metadata import _NAMES, _SETTERS
from gptlite.unpickle import unpickle


@dataclass
class Point:
    x: int = 0
    y: int = 0


def set_point(point: Point, state: Any) -> None:
    point.x, point.y = state["x"], state["y"]


def double(number: int) -> int:
    return 2 * number


HERE = __name__
NAMES = {(HERE, "Point"): Point, (HERE, "double"): double}
SETTERS = {Point: set_point}


def loaded(content: bytes) -> Any:
    return unpickle(content, NAMES, SETTERS)


@pytest.mark.parametrize("protocol", range(3, 6))  # earlier ones make bytes by calling a function
def test_plain_values_come_back(protocol: int) -> None:
    value = {"a": [1, 2.5, None, True, b"x", "é", (1, (2,))], 3: {"deep": [{}]}, b"k": -(2**80), None: ()}
    assert loaded(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_of_the_named_classes_come_back(protocol: int) -> None:
    assert loaded(pickle.dumps([Point(1, 2), {"p": Point(3, 4)}], protocol)) == [Point(1, 2), {"p": Point(3, 4)}]


def test_the_named_functions_are_called() -> None:
    assert loaded(b"c" + f"{HERE}\ndouble\n".encode() + b"(K\x04tR.") == 8


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def word(name: str) -> bytes:
    return b"c" + f"{HERE}\n{name}\n".encode()


REFUSED = {
    "another name": pickle.dumps(print),
    "another class": pickle.dumps(OrderedDict(a=1)),
    "a class called": word("Point") + b")R.",
    "a class with arguments": word("Point") + b"(K\x01K\x02t\x81.",
    "a state of the class": word("Point") + b"}(X\x08\x00\x00\x00__hash__K\x01ub.",
    "a state of a function": word("double") + b"}(X\x01\x00\x00\x00aK\x01ub.",
    "items of an object": word("Point") + b")\x81" + b"(X\x01\x00\x00\x00aK\x01u.",
    "items of a class": word("Point") + b"(X\x01\x00\x00\x00aK\x01u.",
    "appended to an object": word("Point") + b")\x81K\x01a.",
    "a key that is a tuple": b"}(K\x01)\x85K\x02u.".replace(b"K\x01)\x85", b"K\x01\x85"),
    "a key that is a function": b"}" + word("double") + b"K\x01s.",
    "half an item": b"}(K\x01u.",
    "a set": pickle.dumps({1, 2}, 4),
    "a frozen set": pickle.dumps(frozenset([1]), 4),
    "an extension": b"\x82\x01.",
    "a persistent id": b"Pabc\n.",
    "a result called": word("double") + b"(K\x01tR(K\x01tR.",
    "a damaged one": b"\x80\x04K",
    "an empty one": b"",
    "a protocol of the future": b"\x80\x63.",
    "a string longer than the file": b"X" + struct.pack("<I", 2**32 - 1) + b"a.",
    "a list in itself called": b"](h\x00R.",
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_anything_else_is_refused(content: bytes) -> None:
    before = dict(vars(Point)), dict(vars(double))
    with pytest.raises(pickle.UnpicklingError):
        loaded(content)
    assert (dict(vars(Point)), dict(vars(double))) == before


def test_no_code_runs(tmp_path: Path) -> None:
    payload = pickle.dumps(Touch(tmp_path / "ran"))
    with pytest.raises(pickle.UnpicklingError, match="which is not allowed"):
        loaded(payload)
    assert not (tmp_path / "ran").exists()
    pickle.loads(payload)
    assert (tmp_path / "ran").exists()


def nested_key(depth: int) -> bytes:
    """A dict whose key is a tuple of twice the same tuple, and so on: its hash visits 2 ** depth of them."""
    return b"}" + b"K\x01" + b"2\x86" * depth + b"K\x01s."


def test_no_key_takes_years_to_hash() -> None:
    began = time.monotonic()
    with pytest.raises(pickle.UnpicklingError, match="a key of type tuple"):
        loaded(nested_key(100))
    assert time.monotonic() - began < 1
    assert pickle.loads(nested_key(3)) == {((((1, 1),) * 2), (((1, 1),) * 2)): 1}


def metadata(*opcodes: bytes) -> bytes:
    return b"\x80\x04ctorch.distributed.checkpoint.metadata\n" + b"".join(opcodes) + b"."


SIZE = b"ctorch\nSize\n"
HOSTILE = {
    "a hash of the class": metadata(b"MetadataIndex\n", b"}(X\x08\x00\x00\x00__hash__Nub"),
    "slots of the class": metadata(b"MetadataIndex\n", b"N}(X\x08\x00\x00\x00__hash__Nu\x86b"),
    "an unknown field": metadata(b"Metadata\n", b")\x81}(X\x01\x00\x00\x00xNub"),
    "a field of another type": metadata(b"MetadataIndex\n", b")\x81}(X\x03\x00\x00\x00fqnNub"),
    "an offset of tuples": metadata(
        b"MetadataIndex\n", b")\x81}(X\x06\x00\x00\x00offset" + SIZE + b"K\x01\x85\x85\x85R" + b"ub"
    ),
    "a member that there is not": metadata(b"_MEM_FORMAT_ENCODING\n", b"(K\x63tR"),
    "an attribute of a class": b"\x80\x04cbuiltins\ngetattr\n"
    + metadata(b"Metadata\n", b"X\x07\x00\x00\x00__doc__\x86R")[2:],
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_metadata_changes_no_class(content: bytes) -> None:
    before = [dict(vars(each)) for each in _SETTERS]
    with pytest.raises(pickle.UnpicklingError):
        unpickle(content, _NAMES, _SETTERS)
    assert [dict(vars(each)) for each in _SETTERS] == before


def test_metadata_of_dcp_comes_back() -> None:
    index = MetadataIndex("w", torch.Size([3, 0]), 1)
    whole = Metadata({}, None, {index: 1})
    found = unpickle(pickle.dumps(whole), _NAMES, _SETTERS)
    assert found == whole
    assert found.storage_data[MetadataIndex("w", [3, 0])] == 1


def test_a_reason_is_short() -> None:
    """A number in a damaged pickle can be as long as the file, and Python's error has all of it."""
    with pytest.raises(pickle.UnpicklingError, match="could not convert string to float") as refusal:
        loaded(b"F" + b"1q" * 10_000 + b"\n.")
    assert len(str(refusal.value)) < 300
