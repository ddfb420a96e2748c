"""A sweep that was killed goes on, and does nothing twice."""

import json
import os
import signal
from pathlib import Path

import pytest
from distributed.cells.commands import TRAIN, Start

from sweep.sweeps import begun, records, statuses, stopped_in_second


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    run = stopped_in_second(start, folder)
    first = folder / "0-max_steps2" / "result.json"
    before = first.stat().st_mtime_ns
    assert json.loads((folder / "sweep.json").read_text())["sweep"]["cells"] == 3
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.communicate(timeout=30)
    assert run.left() == []
    assert statuses(folder) == ["ok"]
    code, output, errors = start(TRAIN, "-m", f"hydra.sweep.dir={folder}").end(250)
    assert code == 0, errors
    assert begun(output) == ["max_steps=1000", "max_steps=3"]
    assert "resuming from" in (folder / "1-max_steps1000" / "train.log").read_text()
    assert statuses(folder) == ["ok", "ok", "ok"]
    assert first.stat().st_mtime_ns == before
    assert [record.result["step"] for record in records(folder)] == [2, 1000, 3]
    # Again: nothing is left to do.
    code, output, errors = start(TRAIN, "-m", f"hydra.sweep.dir={folder}").end(120)
    assert (code, begun(output)) == (0, []), errors
    assert "3 cells" in output
