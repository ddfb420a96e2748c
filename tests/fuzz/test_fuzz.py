"""Readers of foreign files, given damaged and hostile ones: one line refuses them, in seconds and little memory."""

import resource
import time
from pathlib import Path

import pytest
from fuzz.readers import READERS, Reader
from hypothesis import HealthCheck, Phase, given, seed, settings

from gptlite.errors import ConfigError

QUICK, LONG = 40, 20_000  # executions of a reader
SECONDS, BYTES = 10.0, 1 << 30  # limits of an execution
SEED = 40
LONGEST = 3000  # characters of a message


def fuzz(reader: Reader, executions: int, number: int = SEED) -> None:
    """Run a reader on drawn files. Raises what the reader may not raise; Hypothesis shows the smallest such file."""

    @seed(number)
    @settings(
        max_examples=executions,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(reader.files)
    def execute(content: bytes) -> None:
        started, before = time.monotonic(), _peak()
        try:
            reader.read(content)
        except (ConfigError, *reader.refusals) as error:
            words = str(error).encode().decode()  # half of a surrogate pair could not be printed
            assert "\n" not in words, words
            assert len(words) <= LONGEST, words
        assert time.monotonic() - started < SECONDS
        assert _peak() - before < BYTES

    execute()


def _peak() -> int:
    """Return the largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name](tmp_path), QUICK)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_twenty_thousand_damaged_files_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    fuzz(READERS[name](tmp_path), LONG)
