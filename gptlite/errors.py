"""User errors. Each message is one line that names the key, its value and the fix."""

import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

TRACEBACK = "--traceback"  # argument of any command
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


class RunEnded(RuntimeError):
    """Error that ends a run in one line.

    `word` begins the status in result.json. `advice` follows the message, with the learning rate as `lr`: what is
    saved, and what to change. `everywhere` is False if a single rank may raise it, for which the others then wait.
    """

    word = "failed"
    advice = ""
    everywhere = True


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


def print_refusal(error: BaseException) -> None:
    """Print the one line of a refusal to stderr; before it the traceback, if the command line has TRACEBACK."""
    if TRACEBACK in sys.orig_argv:
        from traceback import print_exception  # imported only for an error

        print_exception(error)
    print(f"error: {error}", file=sys.stderr, flush=True)


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


# What helps against an error of the operating system.
CURES = {
    errno.ENOSPC: "free some space, or {elsewhere}",
    errno.EDQUOT: "free some space, raise the quota, or {elsewhere}",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or {elsewhere}",
    errno.EACCES: "change the permissions, or {elsewhere}",
    errno.EPERM: "change the permissions, or {elsewhere}",
    errno.EROFS: "mount it writable, or {elsewhere}",
    errno.EMFILE: "raise the limit of open files (ulimit -n), and run the same command again",
    errno.ENFILE: "close other programs, or raise the system's limit of open files (sysctl fs.file-max)",
    errno.ENAMETOOLONG: "{elsewhere} that is shorter",
    errno.EISDIR: "it is a folder; remove it, or {elsewhere}",
    errno.ENOTDIR: "a folder of this path is a file; remove that file, or {elsewhere}",
    errno.EEXIST: "remove it, or {elsewhere}",
    errno.ENOTEMPTY: "empty it, or {elsewhere}",
    errno.ENOENT: "create it, or {elsewhere}; if it has just been removed, run the same command again",
    errno.ELOOP: "remove the link",
    errno.EXDEV: "{elsewhere}, on the same file system",
    errno.ESTALE: "the file server has lost it; mount it again, and run the same command again",
    errno.EIO: "check the disk (dmesg shows its errors), or {elsewhere}",
    errno.ETIMEDOUT: "check the file server and the network, and run the same command again",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), and run the same command again",
    errno.ENOMEM: "close other programs, or use a machine with more memory",
}
# Errors of reading and writing an open file, to which Python adds no name.
_UNNAMED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EACCES, errno.EROFS, errno.EISDIR}
_UNNAMED |= {errno.ETIMEDOUT}
# Limits of the machine. A call that reaches one may name no file, such as the start of a process.
_LIMITS = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}


def system_error(error: OSError, elsewhere: str = "give another path") -> str:
    """Return an OSError in one line: the file, the reason, and what helps (`CURES`), such as what to give instead."""
    names = [os.fsdecode(each) for each in (named(error).filename, error.filename2) if isinstance(each, str | bytes)]
    reason = error.strerror if isinstance(error.strerror, str) else text_of(error)
    words = " ".join((reason or type(error).__name__).split())  # of one line
    cure = CURES.get(error.errno or 0, "").format(elsewhere=elsewhere)
    text = f"{' -> '.join(names)}: {words}" if names else words
    return printable(text if not cure or cure in words else f"{text}; {cure}")


def is_of_a_file(error: OSError) -> bool:
    """Return True if an operation on a file has failed, or a limit of the machine is reached. Any other OSError, such
    as that of a closed socket or of a process that has ended, is an error of the program."""
    return isinstance(named(error).filename, str | bytes) or error.errno in _LIMITS


def print_failure(error: Exception) -> None:
    """Print an error of a file in one line, and any other error with its traceback."""
    if isinstance(error, OSError) and is_of_a_file(error):
        print_refusal(OSError(system_error(error)).with_traceback(error.__traceback__))
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def named(error: OSError) -> OSError:
    """Return the error, with the name of the file if it has none, because it is of reading or writing an open file.

    The file is then a variable of a function in the traceback, or an attribute of one.
    """
    from traceback import walk_tb  # imported only for an error

    if error.filename is None and error.errno in _UNNAMED:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        variables = [each for frame in reversed(frames) for each in frame.f_locals.values()]
        values = (value for each in variables for value in (each, *tuple(getattr(each, "__dict__", {}).values())))
        names = (getattr(each, "name", None) for each in values if isinstance(each, io.IOBase))
        if name := next((each for each in names if isinstance(each, str) and not each.startswith("<")), None):
            error.filename = name  # None would be part of the message
    return error


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager for the use of an open file: adds its `path` to errors that do not name a file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise
