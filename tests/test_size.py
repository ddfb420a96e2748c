"""tools/size.py, and limits on sizes."""

import ast
import json
import re
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


def test_imports_are_followed(tmp_path):
    files = {
        "gptlite/__init__.py": "",
        "gptlite/pretrain.py": "from typing import TYPE_CHECKING\n\nimport gptlite.a\nfrom gptlite import b\n"
        "if TYPE_CHECKING:\n    import gptlite.never\nelse:\n    import gptlite.c\n",
        "gptlite/a.py": "def f():\n    import gptlite.later\n",
        "gptlite/b.py": "class B:\n    from gptlite.kernels.library import load\n",
        "kernels/__init__.py": "# an installed package, beside the others\n",
        "kernels/library.py": "import torch\n",
        **{f"gptlite/{name}.py": "import gptlite.pretrain\n" for name in ("c", "later", "never")},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {str(path) for path in SIZE["imported"](tmp_path, "gptlite.pretrain", False)}
    assert found == files.keys() - {"gptlite/later.py", "gptlite/never.py"}
    assert {str(path) for path in SIZE["imported"](tmp_path, "gptlite.pretrain", True)} - found == {"gptlite/later.py"}
    assert "gptlite.pretrain imports 7 files, 15 lines at import" in SIZE["report"](tmp_path)


def test_training_imports_no_more_than_promised():
    """docs/decisions/0036-the-core-imports-no-satellite.md"""
    for inside_functions, most in ((False, 22_000), (True, 24_200)):
        files = SIZE["imported"](ROOT, SIZE["CORE"], inside_functions)
        assert sum(SIZE["count_lines"](ROOT / file) for file in files) <= most


def test_a_training_step_is_read_in_3000_lines():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("## Reading a training step") : text.index("The core is")]
    files = re.findall(r"`(gptlite/[\w/]+\.py)`", table)
    assert len(files) == len(set(files)) == 15
    assert sum(SIZE["count_lines"](ROOT / file) for file in files) < 3000


@pytest.mark.parametrize(
    ("name", "limit"), [("train.py", 80), ("gptlite/pretrain.py", 81), ("gptlite/trainer/trainer.py", 300)]
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
