"""User errors. Each message is one line that names the key, its value and the fix."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

NO_HOME = "Could not determine home directory."  # message of pathlib's RuntimeError


def printable(text: object, keep: str = "") -> str:
    """Return the text with characters that a terminal would act on, or could not print, as e.g. `\\x1b` or `\\u202e`.

    Names in files of others may have such characters: escape sequences, line ends, marks that reverse the text. The
    characters in `keep`, such as line ends of a text of several lines, are not changed.
    """
    if (text := str(text)).isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


class ConfigError(ValueError):
    """Raised for an invalid configuration, before anything is written or started. Exit code 2."""

    def __str__(self) -> str:
        return printable(super().__str__())


@contextmanager
def known_home(key: str = "") -> Iterator[None]:
    """Context manager that raises ConfigError for a path with `~`, the value of `key`, if no home folder is known."""
    try:
        yield
    except RuntimeError as error:
        if text_of(error) != NO_HOME or (place := error.__traceback__) is None:
            raise
        while place.tb_next:
            place = place.tb_next
        path = place.tb_frame.f_locals.get("self", "~")  # of Path.expanduser
        name = f"{key}={path}" if key else path
        raise ConfigError(f"{name}: no home folder is known for ~; set HOME, or give an absolute path") from None


@contextmanager
def needed_package(package: str, user: str, instead: str = "") -> Iterator[None]:
    """Context manager for the import of an optional package. Raises ConfigError if it is not installed.

    `package` is the argument of pip install, a package or an extra of gptlite.
    The message names `user`, the key or feature that needs the package, and ends with `instead`, an alternative.
    """
    try:
        yield
    except ImportError:
        raise ConfigError(f"{user} needs a missing package; pip install {package}{instead}") from None


@contextmanager
def without_exit() -> Iterator[None]:
    """Context manager for code that may be a plugin's. Raises RuntimeError if it ends the process by sys.exit, which
    would look like success."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"the run's code called sys.exit({error.code!r})") from error


def text_of(error: BaseException) -> str:
    """Return an exception's message, or a note if its own code cannot print it."""
    try:
        return str(error)
    except (Exception, SystemExit) as another:
        return f"(its message cannot be printed: {type(another).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; empty if there is none."""
    return printable((text_of(error).splitlines() or [""])[0])


def one_line(error: BaseException) -> str:
    """Return an exception's type and message in one line, and the innermost line of the user's own code in its
    traceback, e.g. `ValueError: no such width (my_model.py:26)`."""
    from textwrap import shorten  # imported only for an error
    from traceback import extract_tb

    ours, installed = os.path.dirname(__file__), f"{os.sep}site-packages{os.sep}"
    frames = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    own = [f" ({os.path.basename(file)}:{line})" for file, line in frames if ours not in file and installed not in file]
    place = own[-1] if own else ""
    return printable(f"{type(error).__name__}: {shorten(text_of(error), 300, placeholder='...')}{place}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the closest known word, or "" if none is close."""
    from difflib import get_close_matches  # imported only for an error

    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
