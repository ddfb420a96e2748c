"""Griffe extension that documents a dataclass field by its trailing comment, as the configuration classes need."""

import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension


@cache
def _comments(path: Path) -> dict[int, str]:
    """Return the comments of a source file by line number."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


class FieldComments(Extension):
    """Extension that uses a trailing comment as the docstring of a class attribute that has none."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Set the docstring of an attribute. Griffe calls this for every attribute."""
        if attr.docstring is not None or attr.parent is None or not attr.parent.is_class or attr.endlineno is None:
            return
        if comment := _comments(Path(str(attr.filepath))).get(attr.endlineno):
            attr.docstring = Docstring(comment, lineno=attr.endlineno, endlineno=attr.endlineno, parent=attr)
