"""Readers of files that others may have made, each with a valid file and what a command does with it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

TEXT = "the cat é 漢 <|endoftext|> 0\n"


@dataclass
class Reader:
    """Strategy for damaged versions of a file, and a function that reads one as gptlite's commands do.

    `read` may raise ConfigError or an error of `refusals`.
    """

    files: st.SearchStrategy[bytes]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = ()


def quiet(*_: object) -> None:
    """Discard a line."""


READERS: dict[str, Callable[[Path], Reader]] = {}


def reader(make: Callable[[Path], Reader]) -> Callable[[Path], Reader]:
    """Register a function that writes valid files into a folder and returns their reader."""
    READERS[make.__name__] = make
    return make
