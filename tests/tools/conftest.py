"""Command lines of the package and scripts of tools/, called in this process."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gptlite.config.schema import CONF_DIR

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
    """Runs tools/NAME.py in this process, in the folder `cwd`: imports take most of the time of a new one."""

    def call(name: str, *arguments: str, cwd: Path | None = None) -> Result:
        capsys.readouterr()
        file = TOOLS / f"{name}.py"
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [str(file), *arguments])
            patch.syspath_prepend(str(TOOLS))
            if cwd:
                patch.chdir(cwd)
            with pytest.raises(SystemExit) as end:
                runpy.run_path(str(file), run_name="__main__")
        out, err = capsys.readouterr()
        return Result(int(end.value.code or 0), out, err)

    return call
