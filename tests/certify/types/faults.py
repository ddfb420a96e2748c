"""Whether types find a fault that is planted in a layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from distributed.cells.layouts import Cell

from gptlite.config import load
from gptlite.satellites.certify.types.check import TypesReport, check_types
from gptlite.satellites.certify.types.declared import declarations

Patch = tuple[Any, str, Any]  # an object, its attribute's name, and what is put there


def report_of(patches: Sequence[Patch], cell: Cell) -> TypesReport:
    """The report on a cell while patches are in place. What is declared is what the code declares without them."""
    declared, config = declarations(), load(cell.overrides())
    with ExitStack() as stack:
        for where, attribute, wrong in patches:
            stack.enter_context(patch.object(where, attribute, wrong))
        return check_types(config, cell.world, declared)


def found_by_types(patches: Sequence[Patch], cell: Cell) -> bool:
    """Whether types find the fault that the patches plant in a cell, in which they find nothing without them."""
    return not report_of(patches, cell).passed
