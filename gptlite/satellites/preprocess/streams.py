"""Decompressed byte streams of files and standard input. Compression is detected from the first bytes, not the name."""

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from gptlite.errors import needed_package
from gptlite.files import open_regular

_COMPRESSED = 1 << 14  # bytes given to zstandard at a time; the output may be a thousand times as large


class DamagedInput(Exception):
    """Raised for a file that cannot be read to its end. The message gives the reason."""


class Stream:
    """Sequential reader of a file, or of standard input (`-`), after its first `skip` decompressed bytes."""

    def __init__(self, path: str, skip: int = 0):
        self._file: IO[bytes] = sys.stdin.buffer if path == "-" else open_regular(path)
        head = self._file.peek(6) if isinstance(self._file, io.BufferedReader) else b""  # type: ignore[attr-defined]
        opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
        self.damage = ""
        self._data = opener(self._file) if opener else self._file
        if opener is None and path != "-":
            self._file.seek(skip)
        else:
            self._discard(skip)

    @property
    def raw_position(self) -> int:
        """Number of bytes read so far from the file, before decompression; 0 if unknown."""
        with suppress(OSError, ValueError):
            return self._file.tell()
        return 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes. A shorter result means the end of the file, or `damage`."""
        parts = []
        try:
            while size and not self.damage and (part := self._data.read(size)):
                parts.append(part)
                size -= len(part)
        except (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError) as error:
            self.damage = f"it cannot be read further: {error}"
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the file, unless it is standard input."""
        if self._file is not sys.stdin.buffer:
            self._file.close()

    def _discard(self, size: int) -> None:
        while size:
            part = self.read(min(size, 1 << 20))
            if not part:
                raise DamagedInput(self.damage or "it is shorter than when it was read before")
            size -= len(part)


class _Zstandard:
    """Reader of consecutive zstandard frames. Unlike the library's own reader, it detects a truncated last frame."""

    def __init__(self, file: IO[bytes]):
        with needed_package("zstandard", "a .zst file"):
            import zstandard
        self._file, self._library = file, zstandard
        self._frame: Any = None
        self._ready = memoryview(b"")

    def read(self, size: int) -> bytes:
        while not self._ready:
            compressed = self._file.read(_COMPRESSED)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("its last zstandard frame is cut off")
                return b""
            self._ready = memoryview(self._decompress(compressed))
        part, self._ready = self._ready[:size], self._ready[size:]
        return bytes(part)

    def _decompress(self, compressed: bytes) -> bytes:
        parts = []
        try:
            while compressed:
                self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
                parts.append(self._frame.decompress(compressed))
                compressed = b""
                if self._frame.eof:
                    compressed, self._frame = self._frame.unused_data, None
        except self._library.ZstdError as error:
            raise ValueError(error) from error
        return b"".join(parts)


_OPENERS: dict[bytes, Callable[[Any], Any]] = {  # by the magic bytes of the format
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"\x28\xb5\x2f\xfd": _Zstandard,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"BZh": bz2.BZ2File,
}
