"""`python tools/faults.py cuda`: the table of faults, and a fault in a kernel that compiles in a second."""

import re

import pytest

from gptlite.config.schema import CONF_DIR
from gptlite.errors import ConfigError


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CONF_DIR.parent / "tools"))


def test_every_fault_of_the_table_still_fits_its_source() -> None:
    from fault_trials.cuda import TABLE, read_faults

    faults = read_faults()
    assert len(faults) == len(re.findall(r"^[a-z_0-9]+ \| ", TABLE.read_text(), flags=re.MULTILINE)) >= 80
    assert [fault.what for fault in faults if fault.stale or fault.old == fault.new] == []


def test_an_unknown_op_is_refused() -> None:
    from fault_trials.cuda import Options, chosen

    with pytest.raises(ConfigError, match="ops=nrom: nrom is not one of softmax, "):
        chosen(Options(ops="nrom"))


@pytest.mark.slow
def test_a_planted_fault_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    from fault_trials.cuda import Options, run

    assert run(Options(ops="norm", first=1)) == 0
    assert capsys.readouterr().out == "1 of 1 faults are caught\n"
