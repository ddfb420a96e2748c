"""Choice of the checkpoint in memory that all ranks restore: the newest of which every part survives, intact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_all
from gptlite.progress import Log
from gptlite.satellites.elastic.exchange import Held
from gptlite.satellites.elastic.parts import Box, KeptPart, Name

SHOWN = 4  # ranks or nodes that a line names


def agree(
    records: Sequence[KeptPart], run: str, node: str, mesh: Mesh, log: Log, steps: range
) -> tuple[Held | None, str]:
    """Return the newest checkpoint of a run, of one of these steps, that the ranks' records hold completely.

    Without one, return None and why the newest is not complete; an empty string if there is none at all. Collective.
    Every record that is used has been hashed; a damaged one is logged and not used.
    """
    mine = {(record.name, record.rank): record for record in records if record.name.run == run}
    nodes = from_all(mesh, lambda: node)
    while True:
        holders = _holders(mine, mesh)
        newest = sorted((name for name in holders if name.step in steps), key=lambda name: (-name.step, name.save))
        best = next((name for name in newest if len(holders[name]) == name.world), None)
        if best is None:
            return None, lacking(newest[0], holders[newest[0]]) if newest else ""
        own = {part: record for (name, part), record in mine.items() if name == best}
        broken = [part for part, record in own.items() if not record.intact]
        damaged = from_all(mesh, partial(list, broken))
        if not any(damaged):
            return _held(best, holders[best], own, mesh), ""
        for rank, parts in enumerate(damaged):
            for part in parts if mesh.is_main else ():
                words = f"rank {part}'s part of step {best.step:,} is damaged (its hash differs)"
                log(f"memory of node {nodes[rank]}, rank {rank}: {words}")
        for part in broken:
            del mine[best, part]


def lacking(name: Name, parts: dict[int, Any]) -> str:
    """Return e.g. `memory lacks the parts of ranks 4 and 5 at step 4,810`."""
    missing = [rank for rank in range(name.world) if rank not in parts]
    return f"memory lacks the parts of {named('rank', missing)} at step {name.step:,}"


def named(what: str, names: Sequence[object]) -> str:
    """Return e.g. `node a`, `nodes a and b`, or `8 nodes`."""
    if len(names) > SHOWN:
        return f"{len(names)} {what}s"
    *most, last = map(str, names)
    return f"{what}s {', '.join(most)} and {last}" if most else f"{what} {last}"


def _holders(mine: Mapping[tuple[Name, int], KeptPart], mesh: Mesh) -> dict[Name, dict[int, list[int]]]:
    """Return, for each checkpoint and each of its parts, the ranks that hold it. Collective."""
    holders: dict[Name, dict[int, list[int]]] = {}
    for rank, names in enumerate(from_all(mesh, lambda: [(asdict(name), part) for name, part in mine])):
        for fields, part in names:
            holders.setdefault(Name(**fields), {}).setdefault(part, []).append(rank)
    return holders


def _held(name: Name, holders: dict[int, list[int]], mine: dict[int, KeptPart], mesh: Mesh) -> Held:
    """Return the checkpoint, with the boxes of all its parts."""
    first = {part: record.header["boxes"] for part, record in mine.items() if holders[part][0] == mesh.rank}
    boxes: dict[str, list[Box]] = {}
    for sent in from_all(mesh, lambda: list(first.items())):
        for part, rows in sent:
            for key, offset, sizes, shape, dtype, start in rows:
                box = Box(key, tuple(offset), tuple(sizes), tuple(shape), dtype, start, part)
                boxes.setdefault(key, []).append(box)
    for each in boxes.values():
        each.sort(key=lambda box: (box.rank, box.offset))
    return Held(name, holders, boxes, mine)
