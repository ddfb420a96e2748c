"""`gptlite parity` with parallelism.deterministic=true."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from distributed.cells.layouts import BASE

from gptlite.commands.parity import one_process
from gptlite.config import load
from gptlite.satellites.parity.worker import compare_run, save_reference

WORDS = [*BASE, "precision=fp32", "model.num_layers=1", "data.global_batch_size=4", "parallelism.data=1"]


@pytest.mark.parametrize(("words", "code"), [("parallelism.deterministic=true", 1), ("", 0)])
def test_parity_finds_a_difference_in_the_last_bit(
    words: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = load([*WORDS, *words.split()])
    (step,) = list(one_process(config, 1)[0])
    for folder, loss in (("same", step.loss), ("off", math.nextafter(step.loss, 9))):
        (tmp_path / folder).mkdir()
        save_reference(tmp_path / folder, iter([replace(step, loss=loss)]))
    assert compare_run(tmp_path / "same", config) == 0
    assert "loss within 0.0e+00" in capsys.readouterr().out
    assert compare_run(tmp_path / "off", config) == code
    assert ("loss is off by" in capsys.readouterr().out) == bool(code)
