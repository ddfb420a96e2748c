"""Docstrings open with a noun phrase or a verb."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RIDDLE = re.compile(r"(What|Who|Whose|Where|Whether|How|Which|When)\b")
MOST = 0.05  # of all docstrings


def docstrings() -> Iterator[tuple[Path, int, str]]:
    """File, line and text of every docstring outside tests."""
    for folder in ("gptlite", "kernels", "data", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                if documented and (text := ast.get_docstring(node)):
                    yield path, getattr(node, "lineno", 1), text


def test_few_docstrings_open_with_a_question_word():
    found = list(docstrings())
    riddles = [f"{path.relative_to(ROOT)}:{line}: {text[:60]}" for path, line, text in found if RIDDLE.match(text)]
    assert len(found) > 2000
    assert len(riddles) < MOST * len(found), "\n".join(riddles)
