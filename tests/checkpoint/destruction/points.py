"""Every file operation of a save as a point at which something can happen, and the stage of the save it belongs to.

Python's own doors to the kernel are wrapped: opening for writing, each write of a raw file, fsync, rename, making and
removing. So a point is one system call, and the stages are those of the way that a checkpoint's files take, whatever
code writes them.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ("before data", "data", "after data", "manifest", "before rename", "after rename", "retention")
# What names a file first, by path or by descriptor.
CALLS = ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "fsync", "fdatasync", "ftruncate", "truncate")
CALLS += ("link", "posix_fallocate", "open", "write", "pwrite", "writev")


class Points:
    """Counts operations below `root` by stage, and does `action` before the `index`-th of a stage.

    `torn`: half of what a write was to write is written before the action.
    """

    def __init__(
        self, root: Path, stage: str = "", index: int = 0, action: Callable[[], None] | None = None, torn: bool = False
    ) -> None:
        self.root, self.stage, self.index, self.action, self.torn = Path(root).resolve(), stage, index, action, torn
        self.counts: Counter[str] = Counter()
        self._turn = threading.RLock()

    def install(self) -> None:
        """From here on, until this process ends."""
        for name in CALLS:
            if hasattr(os, name):
                setattr(os, name, self._wrapped(name, getattr(os, name)))
        builtins.open = io.open = self._opener(io.open)  # type: ignore[assignment]

    def stage_of(self, call: str, path: Path, target: Path | None) -> str | None:
        """The stage of an operation; None for one that is no part of a save."""
        if not path.is_relative_to(self.root):
            return None
        top, *below = path.relative_to(self.root).parts or ("",)
        if top.startswith(".trash-") or (target is not None and target.name.startswith(".trash-")):
            return "retention"
        if not top.startswith(".tmp-step-"):
            return "after rename" if top in ("", "latest") or top.startswith(".tmp-latest-") else "before data"
        if call == "rename" and not below:
            return "before rename"
        if path.name == "MANIFEST.json":
            return "manifest"
        if path.suffix == ".distcp":
            return "data"
        if call == "mkdir" and (not below or below == ["data"]):
            return "before data"
        return "before rename" if call == "fsync" and path.is_dir() else "after data"

    def _see(self, call: str, path: Path, target: Path | None = None, tear: Callable[[], Any] | None = None) -> None:
        if (stage := self.stage_of(call, path, target)) is not None:
            self.reach(stage, tear)

    def reach(self, stage: str, tear: Callable[[], Any] | None = None) -> None:
        """A point of a stage has come; `tear` does half of what is about to be done."""
        with self._turn:
            self.counts[stage] += 1
            if self.action is not None and stage == self.stage and self.counts[stage] == self.index + 1:
                if self.torn and tear is not None:
                    tear()
                self.action()

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            path = _path_of(first, kwargs.get("dir_fd"))
            if path is not None and (name != "open" or args[0] & os.O_CREAT):
                target = _path_of(args[0]) if name in ("rename", "replace") else None
                half = name in ("write", "pwrite")
                tear = (lambda: original(first, _half(args[0]), *args[1:])) if half else None
                self._see(name, path, target, tear)
            return original(first, *args, **kwargs)

        return call

    def _opener(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            path = _path_of(file) if isinstance(file, str | os.PathLike) and set(mode) & set("wax+") else None
            if path is None or not path.is_relative_to(self.root) or path.name == ".lock":
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            self._see("open", path)
            raw = _SeenFile(self, path, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

        return opened


class _SeenFile(io.FileIO):
    """A raw file whose writes are points."""

    def __init__(self, points: Points, path: Path, *args: Any) -> None:
        super().__init__(path, *args)
        self._points, self._path = points, path

    def write(self, data: Any) -> int:
        self._points._see("write", self._path, tear=lambda: io.FileIO.write(self, _half(data)))
        return super().write(data)


def _half(data: Any) -> memoryview:
    view = memoryview(data).cast("B")
    return view[: len(view) // 2]


def _path_of(file: Any, folder: int | None = None) -> Path | None:
    """The path of what a call is about, named or open; None for a pipe, say."""
    try:
        if isinstance(file, int):
            return Path(os.readlink(f"/proc/self/fd/{file}"))
        path = Path(os.fsdecode(file))
        base = Path(os.readlink(f"/proc/self/fd/{folder}")) if folder is not None else Path.cwd()
        return base / path
    except (OSError, TypeError):
        return None
