"""Host memory of a node that outlives the ranks which fill it."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from typing import Any

COPIES = 2  # versions of each part: one that is complete, and one that is being written


@dataclass(frozen=True)
class Shelf:
    """Memory of one local rank, in files without a name, which its node's keeper holds open.

    A rank that is forked by the keeper inherits them. So a rank that replaces another one reads what that one wrote,
    and the memory is freed when the last of these processes ends, however it ends. `node` names the keeper among all
    nodes of a run, `launcher` is the process id of the node's launcher. `places[i]` are the COPIES file descriptors for
    the rank's own part (i = 0) and for the parts of its partners (i = 1 to checkpoint.replicas). `notes` is a file of
    all local ranks, with a JSON value.
    """

    node: str
    launcher: int
    places: tuple[tuple[int, ...], ...]
    notes: int

    @classmethod
    def new(cls, node: str, launcher: int, replicas: int, notes: int | None = None) -> Shelf:
        """Create empty memory for a local rank; `notes` is that of the node's other ranks."""
        places = tuple(tuple(_memory("part") for _ in range(COPIES)) for _ in range(1 + replicas))
        return cls(node, launcher, places, _memory("notes") if notes is None else notes)

    def close(self) -> None:
        """Close this process's descriptors, except `notes`."""
        for place in self.places:
            for descriptor in place:
                os.close(descriptor)


def mapped(descriptor: int, size: int | None = None) -> mmap.mmap | None:
    """Map a file of a shelf, after setting its size if one is given. Returns None for an empty file."""
    if size is not None:
        os.ftruncate(descriptor, size)
    length = os.fstat(descriptor).st_size
    return mmap.mmap(descriptor, length) if length else None


def read_notes(descriptor: int) -> Any:
    """Return the JSON value that `write_notes` has written last; None if there is none."""
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).rstrip(b"\0")
    return json.loads(text) if text else None


def write_notes(descriptor: int, value: Any) -> None:
    """Replace the notes. A single write, so that a killed process leaves the old or the new value."""
    text = json.dumps(value).encode()
    length = max(os.fstat(descriptor).st_size, len(text))
    os.pwrite(descriptor, text.ljust(length, b"\0"), 0)


def node_names(shelf: Shelf) -> dict[str, int]:
    """Return the numbers of the nodes of an elastic run, by `Shelf.node`; none in other runs."""
    notes = read_notes(shelf.notes)
    return notes["roster"]["numbers"] if isinstance(notes, dict) and "roster" in notes else {}


def _memory(name: str) -> int:
    return os.memfd_create(f"gptlite-{name}")  # closed in programs that a rank starts, not in forked ranks
