"""The closing lines of a test run."""

from types import SimpleNamespace
from typing import Any

import pytest
from closing import closing, machine

from gptlite.cpu import LIMITS, cpu_level


def config(**options: str) -> Any:
    return SimpleNamespace(getoption=lambda name: options.get(name.removeprefix("--")))


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)


def test_they_name_the_machine_and_versions():
    line = machine()
    assert f", {cpu_level()}, " in line
    assert "cores; Python 3." in line
    assert ", torch 2." in line
    assert closing(config(), []) == [line]


def test_they_name_the_seeds():
    assert closing(config(order="7", sample="5"), [])[1] == ("sample of the tests: --sample=5; test order: --order=7")


def test_after_a_failure_they_say_how_to_repeat_it(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    text = "\n".join(closing(config(order="7"), ["tests/a.py::test_b[1]", "tests/a.py::test_c"]))
    assert "avx2 by ONEDNN_MAX_CPU_ISA=AVX2, " in text or cpu_level() == "baseline"
    assert "To see a failure alone: ONEDNN_MAX_CPU_ISA=AVX2 pytest -n 0 'tests/a.py::test_b[1]'" in text
    assert "ONEDNN_MAX_CPU_ISA=AVX2 pytest --order=7 runs them in this order again" in text
