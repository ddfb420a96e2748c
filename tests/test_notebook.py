"""examples/shakespeare.ipynb: stored without outputs, and executed as a reader would."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "shakespeare.ipynb"
FIRST, CURVES, SECOND, GENERATE = range(1, 5)  # cells, by what is in them
MARKS = {FIRST: "first = launch", CURVES: "first.curves", SECOND: "second = launch", GENERATE: "gptlite generate"}
FIGURES = """
import json
from pathlib import Path
rows = [json.loads(line) for line in Path(second.folder, "metrics.jsonl").read_text().splitlines()]
losses = [row["loss"] for row in rows if "loss" in row]
print(json.dumps([first.metrics, second.metrics, str(second.checkpoint), losses]))
"""


def test_it_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
    for mark in MARKS.values():
        assert sum(mark in "".join(cell["source"]) for cell in code) == 1


@pytest.mark.slow
def test_it_trains_plots_resumes_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a busy machine's threads would wait for each other
    book = nbformat.read(NOTEBOOK, as_version=4)
    book.cells.append(nbformat.v4.new_code_cell(FIGURES))
    nbclient.NotebookClient(book, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {key: next(c for c in book.cells if mark in c.source).outputs for key, mark in MARKS.items()}
    first, second, checkpoint, losses = json.loads(said(book.cells[-1].outputs))
    assert sum(losses[-3:]) / 3 < losses[0] - 1  # nats; of 65 letters all alike it begins at 4.2
    assert second["val_loss"] < first["val_loss"] < 3.31  # what the letters' frequencies alone give
    assert (first["step"], second["step"]) == (120, 240)
    assert (first["world_size"], second["world_size"]) == (1, 2)
    assert checkpoint.endswith("step-00000240")
    for cell in (FIRST, SECOND):
        assert "\rstep " in said(outputs[cell])  # one line, updated
        assert "\neval " in said(outputs[cell])
    assert "image/png" in outputs[CURVES][0].data
    text = said(outputs[GENERATE])
    assert text.startswith("ROMEO:")
    assert len(text) > 150


def said(outputs: list[Any]) -> str:
    """The text that a cell has printed."""
    return "".join(each.text for each in outputs if each.output_type == "stream")
