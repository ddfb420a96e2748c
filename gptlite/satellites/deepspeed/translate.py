"""Translation of a parsed DeepSpeed JSON to rows. Does not import torch."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from gptlite.satellites.deepspeed import keys, sections
from gptlite.satellites.deepspeed.batch import batch
from gptlite.satellites.deepspeed.optimizer import default_clipping, optimizer, schedule
from gptlite.satellites.deepspeed.rows import AUTO, OFF, Kind, Row, Section, in_file_order


def translate(content: dict[str, Any], ranks: int | None = None, overridden: Container[str] = ()) -> list[Row]:
    """Return a row for each key, in the order of the file. `ranks` is the number of data-parallel ranks, or None if
    it is unknown; `overridden` are the keys that the command line sets."""
    root = Section(content, "", [])
    batch(root, ranks, overridden)
    root.apply(keys.ROOT)
    compute = sections.precision(root)
    sections.zero(root, ranks, compute)
    optimizer(root, peak=schedule(root))
    default_clipping(root)
    sections.trackers(root)
    sections.tensor_parallel(root)
    for name, reason in keys.REFUSED_IF_ON.items():
        value = root.get(name, Kind.anything)
        if value not in (None, AUTO):
            root.refuse(name, reason) if _is_on(value, name in keys.NESTED) else root.no_op(name, OFF)
    for name, reason in keys.NO_EFFECT_SECTIONS.items():
        if root.get(name, Kind.anything) not in (None, AUTO):
            root.no_op(name, reason)
    root.close()
    return in_file_order(root.rows, content)


def _is_on(value: Any, nested: bool) -> bool:
    """Return True if a section is enabled.

    Its key `enabled` decides, if it has one. Otherwise a `nested` section is enabled if one of its sections is, and any
    other section if it is not empty.
    """
    if not isinstance(value, dict):
        return bool(value)
    if "enabled" in value:
        return value["enabled"] not in (False, None)
    return any(_is_on(each, nested) for each in value.values() if isinstance(each, dict)) if nested else bool(value)
