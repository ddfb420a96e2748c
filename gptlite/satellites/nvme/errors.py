"""Error for files of model state that cannot be read or written."""

from collections.abc import Iterator
from contextlib import contextmanager

from gptlite.errors import RunEnded
from gptlite.parallelism.messages import passed_on


@passed_on
class OffloadFailed(RunEnded):
    """Error for files of model state that cannot be read or written. It may be raised on one rank only."""

    advice = "; once that is fixed, the same command resumes from the last checkpoint"
    everywhere = False


@contextmanager
def told() -> Iterator[None]:
    """Context manager that raises OffloadFailed for an OSError."""
    try:
        yield
    except OSError as error:
        words = "the model state in parallelism.offload_path cannot be read or written"
        raise OffloadFailed(f"{words}: {error.strerror or error}") from error
