"""Griffe extension: the comment beside a field is its description, as the configuration dataclasses are written."""

import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension


@cache
def _comments(path: Path) -> dict[int, str]:
    """The comments of a source file, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


class FieldComments(Extension):
    """Takes a trailing comment as the docstring of an attribute of a class that has none."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Called for every attribute that griffe has read."""
        if attr.docstring is not None or attr.parent is None or not attr.parent.is_class or attr.endlineno is None:
            return
        if comment := _comments(Path(str(attr.filepath))).get(attr.endlineno):
            attr.docstring = Docstring(comment, lineno=attr.endlineno, endlineno=attr.endlineno, parent=attr)
