"""Command lines of the package, called in this process."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def tool(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Runs the command line of the test module's `command` in this process."""

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["tool.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            request.module.command.main()
        out, err = capsys.readouterr()
        return Result(int(end.value.code or 0), out, err)

    return call
