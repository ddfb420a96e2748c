"""tools/size.py, and the sizes DESIGN promises."""

import ast
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SIZE = runpy.run_path(str(ROOT / "tools" / "size.py"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "train.py": 3,
        "gptlite/config.py": 7,
        "gptlite/model/gpt.py": 401,
        "gptlite/model/mlp.py": 400,
        "gptlite/model/__pycache__/gpt.py": 5000,
        "kernels/norm.cu": 20,
        "kernels/norm.cpp": 10,
        "kernels/.build/norm.cpp": 5000,
        "conf/config.yaml": 5,
        "tests/models/test_gpt.py": 402,
        "outputs/run/config.yaml": 5000,
    }
    for name, count in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n" * count)
    return tmp_path


def test_rooms_and_languages_are_told_apart(checkout):
    rows = [line.split() for line in SIZE["report"](checkout).splitlines()]
    assert ["gptlite", "1", "7"] in rows
    assert ["gptlite/model", "2", "801"] in rows
    assert ["kernels", "2", "10", "20"] in rows
    assert ["conf", "1", "5"] in rows
    assert ["all", "but", "tests", "7", "811", "10", "20", "5"] in rows
    assert ["tests", "1", "402"] in rows


def test_a_notebook_counts_by_its_code(checkout):
    code, text = ({"cell_type": kind, "source": ["a = 1\n", "a"]} for kind in ("code", "markdown"))
    (checkout / "examples").mkdir()
    (checkout / "examples" / "one.ipynb").write_text(json.dumps({"cells": [text, code, code]}))
    assert ["examples", "1", "4"] in [line.split() for line in SIZE["report"](checkout).splitlines()]


def test_only_files_over_the_limit_are_flagged(checkout):
    flagged = [line.split()[1] for line in SIZE["report"](checkout).splitlines() if "split it" in line]
    assert flagged == ["gptlite/model/gpt.py", "tests/models/test_gpt.py"]


@pytest.mark.parametrize(
    ("name", "limit"), [("train.py", 80), ("gptlite/pretrain.py", 81), ("gptlite/trainer/loop.py", 300)]
)
def test_the_files_read_first_stay_short(name, limit):
    assert len((ROOT / name).read_bytes().splitlines()) < limit


def test_no_function_has_ten_parameters():
    found = {}
    for path in [path for folder in ("gptlite", "kernels", "data", "tools") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
                found[f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"] = len(
                    [arg for arg in given if arg not in ("self", "cls")]
                )
    assert len(found) > 2000
    assert [place for place, count in found.items() if count >= 10] == []
