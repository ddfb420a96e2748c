"""Command lines of the package and scripts of tools/, called in this process."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gptlite.__main__ import main as gptlite
from gptlite.config.schema import CONF_DIR
from gptlite.invocation import COMMANDS

TOOLS = CONF_DIR.parent / "tools"


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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs `gptlite NAME` or tools/NAME.py in this process, which has imported torch, in the folder `cwd`."""

    def call(name: str, *arguments: str, cwd: Path | None = None) -> Result:
        capsys.readouterr()
        command, file = [name] if name in COMMANDS else [], TOOLS / f"{name}.py"
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [str(file), *command, *arguments])
            patch.syspath_prepend(str(TOOLS))
            if cwd:
                patch.chdir(cwd)
            with pytest.raises(SystemExit) as end:
                gptlite() if command else runpy.run_path(str(file), run_name="__main__")
        out, err = capsys.readouterr()
        return Result(int(end.value.code or 0), out, err)

    return call
