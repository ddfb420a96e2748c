"""Faults that are planted in a copy of the product, in a guard of each kind, are found by the fuzz."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.readers import READERS

ROOT = Path(__file__).parents[2]
EXECUTIONS = 5000
# Reader, file, and the text that is replaced by another.
FAULTS = {
    "types of a manifest": ("manifest", "checkpoint/manifest.py", "checked(content, _Content)", "content"),
    "types of a row": ("data_order", "data/order_log.py", "checked(row, OrderRow)", "OrderRow(**row)"),
    "types of metrics": (
        "metrics",
        "satellites/plots/curves.py",
        "if type(row.get(key)) in (int, float)",
        "if key in row",
    ),
    "types of a record": (
        "sweep_record",
        "satellites/sweep/folder.py",
        "if each.name in values}, Record)",
        "}, Record)",
    ),
    "types of a result": (
        "result",
        "trainer/result.py",
        "read_json(folder / RESULT, Values)",
        "read_json(folder / RESULT)",
    ),
    "types of RoPE": ("huggingface_config", "satellites/huggingface/llama.py", "not isinstance(rope, dict)", "False"),
    "numbers": ("huggingface_config", "satellites/huggingface/keys.py", "type(value) not in (int, float) or", ""),
    "types of a heartbeat": (
        "heartbeat",
        "satellites/monitor/verdict.py",
        "parse_json(message, Heartbeat)",
        "Heartbeat(**parse_json(message))",
    ),
    "names of schedules": ("sweep_record", "satellites/sweep/compare.py", "schedule not in SCHEDULES or", "False and"),
    "names of files": ("weights_index", "checkpoint/huggingface.py", "not file or ", ""),
    "kinds": ("definition", "tokenizers/base.py", "not in [*_CLASSES]", "not in _CLASSES"),
    "pickles": ("metadata", "unpickle.py", "except Exception as error:", "except EOFError as error:"),
}
RUN = """
import sys, tempfile
from pathlib import Path
import gptlite
assert Path(gptlite.__file__).is_relative_to(sys.argv[1]), gptlite.__file__
from fuzz.readers import READERS
from fuzz.test_fuzz import fuzz
with tempfile.TemporaryDirectory() as folder:
    fuzz(READERS[sys.argv[2]](Path(folder)), int(sys.argv[3]))
print("nothing found")
"""


@pytest.mark.parametrize("name", FAULTS)
def test_the_text_that_a_fault_replaces_is_in_its_file_once(name: str) -> None:
    reader, file, old, _ = FAULTS[name]
    assert (ROOT / "gptlite" / file).read_text(encoding="utf-8").count(old) == 1
    assert reader in READERS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    reader, file, old, new = FAULTS[name]
    package = Path(
        shutil.copytree(ROOT / "gptlite", tmp_path / "gptlite", ignore=shutil.ignore_patterns("__pycache__"))
    )
    text = (package / file).read_text(encoding="utf-8")
    (package / file).write_text(text.replace(old, new), encoding="utf-8")
    command = [sys.executable, "-c", RUN, str(tmp_path), reader, str(EXECUTIONS)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Failing test case" in done.stderr, done.stderr
