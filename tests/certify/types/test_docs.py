"""docs/certify_types.md: the table of ops is that of the code, and the example is right."""

import re
from pathlib import Path

import pytest
from distributed.cells.layouts import Cell

from certify.types.faults import report_of
from gptlite.models import parallel_layers
from gptlite.satellites.certify.types.declared import Declared, declarations

PAGE = (Path(__file__).parents[3] / "docs" / "certify_types.md").read_text(encoding="utf-8")
AXES = {"gptlite.parallelism.tensor": "tp", "gptlite.parallelism.context": "cp", "gptlite.parallelism.expert": "ep"}


def test_the_table_lists_what_the_code_declares():
    listed = set(PAGE.partition("<!-- ops -->")[2].partition("<!-- end of ops -->")[0].strip().splitlines()[2:])
    rows = set()
    for (cls, method), text in declarations().items():
        if cls.__module__ in AXES:
            declared = Declared.of(text)
            passes = f"{declared.forward or 'none'} | {declared.backward or 'none'}"
            name = f"{cls.__module__}.{cls.__qualname__}.{method}"
            rows.add(f"| `{name}` | {AXES[cls.__module__]} | {text} | {passes} |")
    assert listed == rows
    assert len(rows) == 12


@pytest.fixture
def example():
    """The class of the page's example."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    space: dict = {"__name__": "my_plugin"}
    exec(code[1], space)
    return space["SumOfHeads"]


def test_the_example_passes_and_its_mistake_is_named(example):
    # `summed` is the same type change, so the example can take its place in a norm over all heads.
    shared = ("model.norm=rms_norm", "model.qk_norm=true", "model.qk_norm_heads=false")
    cell = Cell(tensor=2, accumulation=2, shared=shared)
    planted = ((parallel_layers, "summed", lambda x, axis: example.apply(x, axis)),)
    report = report_of(planted, cell)
    assert report.passed, report.message
    example.backward = staticmethod(lambda ctx, grad: (grad, None))
    message = report_of(planted, cell).message
    assert "SumOfHeads.backward: over tp, P -> R needs all_reduce, found none" in message
