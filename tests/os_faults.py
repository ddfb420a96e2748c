"""Commands of which one call to the operating system fails, in a process of their own."""

from __future__ import annotations

import builtins
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_files import without_plots

# What names a file first, by path or by descriptor.
CALLS = """
open mkdir rmdir unlink remove rename replace link truncate ftruncate fsync fdatasync write pwrite read listdir scandir
stat lstat
""".split()


class Faults:
    """Counts the calls that concern files below `roots`; the one of the number `at` fails with `code`."""

    def __init__(self, roots: list[Path], at: int, code: int) -> None:
        self.roots, self.at, self.code = [each.resolve() for each in roots], at, code
        self.seen: list[str] = []

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        builtins.open = io.open = self._opener(io.open)  # type: ignore[assignment]

    def see(self, call: str, file: Any, named: bool, folder: int | None = None) -> None:
        """A call is about to be made. `named`: the kernel's error has the file's name, as for a path."""
        path = _path_of(file, folder)
        if path is None or not any(path.is_relative_to(root) for root in self.roots):
            return
        self.seen.append(f"{call} {path}")
        if len(self.seen) == self.at + 1:
            raise OSError(self.code, os.strerror(self.code), *([str(path)] if named else []))

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args:
                self.see(name, args[0], not isinstance(args[0], int), kwargs.get("dir_fd"))
            return original(*args, **kwargs)

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
            path = _path_of(file) if isinstance(file, str | os.PathLike) else None
            if path is None or not any(path.is_relative_to(root) for root in self.roots):
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if opener is None:
                self.see("open", path, True)
            raw = _Faulty(self, path, os.fspath(file), mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            writes = bool(set(mode) & set("wax"))
            kind = io.BufferedRandom if "+" in mode else io.BufferedWriter if writes else io.BufferedReader
            buffered = kind(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

        return opened


class _Faulty(io.FileIO):
    """A raw file whose reads and writes may fail."""

    def __init__(self, faults: Faults, path: Path, *args: Any) -> None:
        super().__init__(*args)
        self._faults, self._path = faults, path

    def write(self, data: Any) -> int:
        self._faults.see("write", self._path, False)
        return super().write(data)

    def readinto(self, buffer: Any) -> int:
        self._faults.see("read", self._path, False)
        return super().readinto(buffer)

    def read(self, size: int = -1) -> bytes:
        self._faults.see("read", self._path, False)
        return super().read(size)

    def readall(self) -> bytes:
        self._faults.see("read", self._path, False)
        return super().readall()


def run(words: list[str], folder: str, watched: list[str], at: int, code: int, notes: str) -> int:
    """Run a command in `folder`; its call `at` to a file below `watched` fails. Writes to `notes` the calls, the last
    of which may have failed."""
    from gptlite.__main__ import main

    os.chdir(folder)
    sys.argv = ["gptlite", *words]
    tempfile.tempdir = None
    faults = Faults([Path(each) for each in watched], at, code)
    note = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    write = os.write
    try:
        faults.install()
        with without_plots():
            main()
    except SystemExit as ended:
        result = ended.code if isinstance(ended.code, int) else 1
    finally:
        write(note, "\n".join(faults.seen).encode())
    sys.stdout.flush()
    return result


def _path_of(file: Any, folder: int | None = None) -> Path | None:
    """The path of what a call is about, named or open; None for a pipe, say."""
    try:
        if isinstance(file, int):
            return Path(readlink(f"/proc/self/fd/{file}"))
        path = Path(os.fsdecode(file))
        base = Path(readlink(f"/proc/self/fd/{folder}")) if folder is not None else Path.cwd()
        return Path(os.path.normpath(base / path))
    except (OSError, TypeError, ValueError):
        return None


readlink = os.readlink
