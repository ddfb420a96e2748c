"""Choice of the checkpoint in memory that all ranks restore: the newest of which every part survives, intact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_all
from gptlite.progress import Log
from gptlite.satellites.elastic.exchange import Held
from gptlite.satellites.elastic.parts import Box, Name, Record

SHOWN = 4  # ranks or nodes that a line names


def agree(records: Sequence[Record], run: str, node: str, mesh: Mesh, log: Log, least: int) -> tuple[Held | None, str]:
    """Return the newest checkpoint of a run, of a step of at least `least`, that the ranks' records hold completely.

    Without one, return None and why the newest is not complete; an empty string if there is none at all. Collective.
    Every record that is used has been hashed; a damaged one is logged and not used.
    """
    mine = {(record.name, record.rank): record for record in records if record.name.run == run}
    while True:
        known = from_all(mesh, lambda: [(asdict(name), part) for name, part in mine])
        holders: dict[Name, dict[int, list[int]]] = {}
        for rank, each in enumerate(known):
            for name, part in each:
                holders.setdefault(Name(**name), {}).setdefault(part, []).append(rank)
        newest = sorted((n for n in holders if n.step >= least), key=lambda n: (-n.step, n.save))
        whole = [name for name in newest if len(holders[name]) == name.world]
        if not whole:
            return None, lacking(newest[0], holders[newest[0]]) if newest else ""
        damaged = from_all(mesh, lambda: [key[1] for key, r in mine.items() if key[0] == whole[0] and not r.intact])
        if not any(damaged):
            own = {part: record for (name, part), record in mine.items() if name == whole[0]}
            return _held(whole[0], holders[whole[0]], own, mesh), ""
        nodes = from_all(mesh, lambda: node)
        for rank, each in enumerate(damaged):
            for part in each:
                words = f"rank {part}'s part of step {whole[0].step:,}"
                if mesh.is_main:
                    log(f"memory of node {nodes[rank]}, rank {rank}: {words} is damaged (its hash differs)")
        for part in damaged[mesh.rank]:
            del mine[whole[0], part]


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


def _held(name: Name, holders: dict[int, list[int]], mine: dict[int, Record], mesh: Mesh) -> Held:
    """Return the checkpoint, with the boxes of all its parts."""
    first = {part: record.header["boxes"] for part, record in mine.items() if holders[part][0] == mesh.rank}
    boxes: dict[str, list[Box]] = {}
    for each in from_all(mesh, lambda: list(first.items())):
        for part, rows in each:
            for key, offset, sizes, shape, dtype, start in rows:
                box = Box(key, tuple(offset), tuple(sizes), tuple(shape), dtype, start, part)
                boxes.setdefault(key, []).append(box)
    for each in boxes.values():
        each.sort(key=lambda box: (box.rank, box.offset))
    return Held(name, holders, boxes, mine)
