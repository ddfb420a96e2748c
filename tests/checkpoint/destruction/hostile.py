"""Checkpoints made by an attacker, who has rewritten the manifest, too: pickles that would run code, and stranger ones.

Every payload that would run something makes the file `canary`. None may appear.
"""

import io
import json
import os
import pickle
import struct
import subprocess
import timeit
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

# Names that STACK_GLOBAL would follow from a module that checkpoints do need.
DOTTED = (
    ("torch", "serialization.os.system"),
    ("torch", "os.system"),
    ("torch.serialization", "os.system"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo.__init__.__globals__"),
    ("torch", "Size.__class__"),
)
# A number for os.system where copyreg has been told of it.
EXTENSION = ("os", "system", 0x77)


class Call:
    """Pickles to a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class Built:
    """Pickles to an object of another class whose state is a call."""

    def __init__(self, cls: type, state: Any) -> None:
        self.cls, self.state = cls, state

    def __reduce__(self) -> tuple[Any, ...]:
        return self.cls, (), self.state


def calls(canary: Path) -> dict[str, Call]:
    """Ways to make the canary by one call."""
    code = f"open({str(canary)!r}, 'w').close()"
    return {
        "os.system": Call(os.system, f"touch {canary}"),
        "builtins.eval": Call(eval, code),
        "builtins.exec": Call(exec, code),
        "builtins.open": Call(open, str(canary), "w"),
        "subprocess.call": Call(subprocess.call, ["touch", str(canary)]),
        "Path.touch": Call(Path.touch, canary),
        "os.mkdir": Call(os.mkdir, str(canary)),
        "timeit.timeit": Call(timeit.timeit, code, "", timeit.default_timer, 1),
        "torch.save": Call(torch.save, 1, str(canary)),
    }


def metadata_payloads(canary: Path, intact: bytes) -> dict[str, bytes]:
    """What may stand in `.metadata`, by name. `intact` is what stood there."""
    found: dict[str, bytes] = {}
    for name, call in calls(canary).items():
        for protocol in range(6) if name == "os.system" else (2, 4):
            found[f"{name}, protocol {protocol}"] = pickle.dumps(call, protocol=protocol)
    call = calls(canary)["os.system"]
    found["in the metadata's dict of tensors"] = altered(intact, lambda m: m.state_dict_metadata.update(extra=call))
    found["deep in planner_data"] = altered(intact, lambda m: setattr(m, "planner_data", {"a": [{"b": (call,)}]}))
    found["in a file's description"] = altered(intact, lambda m: set_places(m, transform_descriptors=call))
    found["a dict's key"] = pickle.dumps({Hashed(os.system, f"touch {canary}"): 1})
    found["the state of an allowed class"] = pickle.dumps(Built(Metadata, {"state_dict_metadata": call}))
    found["before a whole metadata"] = pickle.dumps(call, protocol=2)[:-1] + b"0" + intact
    command = f"touch {canary}".encode()
    system = b"\x8c" + bytes([len(command)]) + command + b"\x85R."
    found["STACK_GLOBAL"] = b"\x80\x04\x8c\x02os\x8c\x06system\x93" + system
    for module, name in DOTTED:
        words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
        found[f"STACK_GLOBAL {module} {name}"] = b"\x80\x04" + words + b"\x93" + system
    found["GLOBAL"] = b"cos\nsystem\n(V" + command + b"\ntR."
    found["INST"] = b"(V" + command + b"\nios\nsystem\n."
    found["OBJ"] = b"(cos\nsystem\nV" + command + b"\no."
    found["NEWOBJ"] = b"\x80\x02cpathlib\nPosixPath\n(V" + str(canary).encode() + b"\nt\x81."
    found["a persistent id"] = b"\x80\x02(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x01tQ."
    found["a persistent id of protocol 0"] = b"Pos.system\n."
    found["an extension code"] = b"\x80\x02\x82\x77(V" + command + b"\ntR."  # of EXTENSION
    found["a file of torch.save"] = torch_file({"a": torch.zeros(3), "b": call})
    found["an old file of torch.save"] = old_torch_file(call)
    found["torch.storage._load_from_bytes"] = pickle.dumps(Call(torch.storage._load_from_bytes, old_torch_file(call)))
    return found | strange_payloads(intact)


def strange_payloads(intact: bytes) -> dict[str, bytes]:
    """What runs nothing, and is no metadata."""
    found = {
        "empty": b"",
        "cut off": intact[: len(intact) // 2],
        "no pickle": b"hello\n",
        "an integer": pickle.dumps(7),
        "a dict": pickle.dumps({}),
        "a list without an end": b"\x80\x04" + b"]" * 100_000,
        "a list in a list in a list": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "an unknown memo": b"h\x07.",
        "a wrong call": pickle.dumps(Call(torch.Size, "a", "b")),
        "an absent module": b"cno_such_module\nname\n.",
        "a module by path": b"c../../os\nsystem\n.",
        "a huge string": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
    }
    found["no place for any tensor"] = altered(intact, lambda m: m.storage_data.clear())
    for name, changes in {
        "an absolute path": {"relative_path": "/etc/passwd"},
        "a path out of it": {"relative_path": "../../../../../../etc/passwd"},
        "a negative offset": {"offset": -100, "length": 10},
        "beyond the file": {"offset": 1 << 40, "length": 10},
        "short": {"offset": 0, "length": 3},
        "an unknown transform": {"transform_descriptors": ["zstd"]},
        "whole files of another folder": {"relative_path": "../../other/data/__0_0.distcp"},
    }.items():
        found[name] = altered(intact, lambda m, changes=changes: set_places(m, **changes))
    for name, change in {
        "every chunk twice": lambda entry: entry.chunks.extend(entry.chunks),
        "enormous tensors": lambda entry: setattr(entry, "size", torch.Size([1 << 40])),
    }.items():
        found[name] = altered(intact, lambda m, change=change: [change(e) for e in m.state_dict_metadata.values()])
    return found


def altered(intact: bytes, change: Callable[[Any], object]) -> bytes:
    """The metadata after a change."""
    metadata = pickle.loads(intact)
    change(metadata)
    return pickle.dumps(metadata)


def set_places(metadata: Any, **changes: object) -> None:
    """Describes every stored box otherwise."""
    for place in metadata.storage_data.values():
        vars(place).update(changes)


def item_payloads(canary: Path) -> dict[str, bytes]:
    """What may stand in the place of a tensor in a `.distcp` file."""
    found: dict[str, bytes] = {"nothing": b"", "no file": b"hello\n" * 20}
    for name, call in calls(canary).items():
        found[f"torch.save of {name}"] = torch_file(call)
        found[f"an old torch.save of {name}"] = old_torch_file(call)
        found[f"a pickle of {name}"] = pickle.dumps(call, protocol=2)
    values = {
        "a dict with a tensor": {"a": torch.zeros(3), "b": calls(canary)["builtins.eval"]},
        "another tensor": torch.zeros(7, 7),
        "a longer one": torch.zeros(100),
        "another dtype": torch.zeros(6, dtype=torch.int64),
        "a module": torch.nn.Linear(2, 2),
    }
    found |= {name: torch_file(value) for name, value in values.items()}
    found["a TorchScript archive"] = script_archive(canary)
    return found


def script_archive(canary: Path) -> bytes:
    """A zip file that says it is TorchScript, with a pickle that would run code."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/constants.pkl", pickle.dumps(calls(canary)["os.system"], protocol=2))
        archive.writestr("x/data.pkl", pickle.dumps(calls(canary)["os.system"], protocol=2))
        archive.writestr("x/version", "3\n")
    return file.getvalue()


def torch_file(value: object, **options: bool) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def old_torch_file(call: Call) -> bytes:
    """torch.save as before version 1.6, which begins with plain pickles."""
    return torch_file(call, _use_new_zipfile_serialization=False)


class Hashed(Call):
    """One that a dict takes."""

    def __hash__(self) -> int:
        return 1


def manifest_edits() -> dict[str, Callable[[dict[str, Any]], object]]:
    """What an attacker may do to a manifest and leave its checksum right."""

    def entry(name: str, **changes: object) -> Callable[[dict[str, Any]], object]:
        return lambda manifest: manifest["files"].setdefault(name, {"bytes": 0, "sha256": "0" * 64}).update(changes)

    keys = ("format_version", "meta", "environment", "files", "tensors", "created")
    edits: dict[str, Callable[[dict[str, Any]], object]] = {}
    for key in keys:
        edits[f"without {key}"] = lambda manifest, key=key: manifest.pop(key)
    for key in ("meta", "files", "tensors"):
        edits[f"{key} a list"] = lambda manifest, key=key: manifest.update({key: [1]})
        edits[f"{key} of numbers"] = lambda manifest, key=key: manifest.update({key: {"w": 7}})
    return edits | {
        "an unknown key": lambda manifest: manifest.update(run="rm -rf /"),
        "another format": lambda manifest: manifest.update(format_version="1"),
        "no step": lambda manifest: manifest["meta"].pop("step"),
        "a step in words": lambda manifest: manifest["meta"].update(step="one"),
        "an absolute path": entry("/etc/passwd"),
        "a path out of the folder": entry("../../../../../../../../etc/passwd"),
        "a NUL in a path": entry("data/\0"),
        "a name without an end": entry("x" * 5000),
        "a size in words": entry("config.yaml", bytes="many"),
        "no hash": entry("config.yaml", sha256=None),
        "no file at all": lambda manifest: manifest["files"].clear(),
        "another shape": lambda manifest: manifest["tensors"]["w"].update(shape=[1 << 50]),
        "another dtype": lambda manifest: manifest["tensors"]["w"].update(dtype="system"),
    }


def replace(folder: Path, name: str, content: bytes) -> None:
    """Writes a file of a checkpoint, and its manifest anew so that all fits."""
    (folder / name).write_bytes(content)
    entry = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["files"].__setitem__(name, entry))


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest, and its checksum with it."""
    path = folder / "MANIFEST.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    edit(content)
    checksum = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": checksum, **content}, indent=1) + "\n")


def replace_item(folder: Path, key: str, content: bytes) -> None:
    """Puts other bytes where a tensor is stored, with `.metadata` and the manifest to match."""
    metadata = pickle.loads((folder / "data" / ".metadata").read_bytes())
    (place,) = (place for index, place in metadata.storage_data.items() if index.fqn == key)
    name = f"data/{place.relative_path}"
    old = (folder / name).read_bytes()
    place.offset, place.length = len(old), len(content)
    replace(folder, name, old + content)
    replace(folder, "data/.metadata", pickle.dumps(metadata))
