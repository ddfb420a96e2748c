"""The process that ranks are forked from is the tests' own: a process has one, and the first to start it says what it
has imported and where it looks for modules."""

import pytest
from forked import start_server


@pytest.fixture(autouse=True)
def of_the_tests() -> None:
    """Before each test, since another one may have ended it."""
    start_server()


@pytest.fixture(autouse=True, scope="module")
def of_the_tests_already() -> None:
    """Before what a module's tests share."""
    start_server()
