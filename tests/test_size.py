"""Limits on the sizes of files, functions and imports, as tools/size.py counts them."""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SIZE = runpy.run_path(str(ROOT / "tools" / "size.py"))


def test_all_imports_are_counted_except_those_of_type_checking(tmp_path):
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


def test_many_parameters_and_imports_that_go_up_or_around_are_listed(tmp_path):
    files = {
        "tests/test_imports.py": 'ROOMS = {**{"files": 0}, "ops": 1, "run": 2}\n',
        "gptlite/ops/a.py": "def f(a, b, c, d, e, *f, g, **h):\n    from gptlite.run.b import f\n",
        "gptlite/run/b.py": "from gptlite.ops import a\nclass C:\n    def f(self, a, b, c, d, e, f, g): ...\n",
        "gptlite/files.py": "from gptlite.ops.c import d\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = list(SIZE["_structure"](tmp_path))
    assert lines[:2] == ["1 functions have 8 or more parameters", "    gptlite/ops/a.py: f"]
    up = ["    gptlite/files.py imports ops", "    gptlite/ops/a.py imports run"]
    assert lines[2:5] == ["2 imports go up across packages", *up]
    assert "gptlite.ops.a -> gptlite.run.b -> gptlite.ops.a" in f"{lines[5]} -> {lines[5].split(' -> ')[1]}"


def test_training_imports_no_more_than_promised():
    """docs/decisions/0036-the-core-imports-no-satellite.md"""
    for inside_functions, most_files, most_lines in ((False, 160, 19_000), (True, 175, 21_100)):
        files = SIZE["imported"](ROOT, SIZE["CORE"], inside_functions)
        assert len(files) <= most_files
        assert sum(SIZE["count_lines"](ROOT / file) for file in files) <= most_lines


def test_training_a_gpt_imports_no_support_of_plain_modules():
    """Not even inside a function: a plug-in's model brings it."""
    files = {str(file) for file in SIZE["imported"](ROOT, SIZE["CORE"], True)}
    assert len(files) > 100
    assert files.isdisjoint(f"gptlite/models/{name}.py" for name in ("spec", "plain", "batch_norm", "flops", "scores"))


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
