"""A checkpoint on disk from one in memory, written by ranks that are too few for the run's layout."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.store import step_folders, step_of
from gptlite.config.saved import from_yaml
from gptlite.config.schema import Config
from gptlite.data.build import open_data
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_all, from_main
from gptlite.progress import Log
from gptlite.satellites.elastic.agree import agree
from gptlite.satellites.elastic.exchange import Held, fill
from gptlite.satellites.elastic.parts import File
from gptlite.satellites.elastic.shelf import Shelf


def write_to_disk(shelf: Shelf, config: Config, log: Log = print) -> Path | None:
    """Write the newest checkpoint of a run that is complete in memory as a checkpoint on disk, and return its folder.

    Returns None if memory has no checkpoint of a step after the newest on disk. Collective over the default process
    group of all ranks, of any number; a single rank needs none. A rank needs memory for its share of the tensors, which
    it writes whole. `log` is called on rank 0.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = Mesh(torch.device("cpu"), resolve(ParallelismConfig(), world), rank)
    path = Path(config.run.dir).expanduser()
    records = [record for place in shelf.places for each in place for record in File(each).records()]
    runs = {record.name.run for record in records if record.name.run.startswith(f"{path.resolve()} ")}
    on_disk = from_main(mesh, lambda: next(map(step_of, step_folders(path / "checkpoints")), None) or 0)
    for run in sorted({run for each in from_all(mesh, lambda: sorted(runs)) for run in each}):
        held, reason = agree(records, run, shelf.node, mesh, log, range(on_disk + 1, sys.maxsize))
        if held is not None:
            return _write(held, config, mesh, log)
        if reason and mesh.is_main:
            log(f"no checkpoint is written from memory: {reason}")
    return None


def _write(held: Held, config: Config, mesh: Mesh, log: Log) -> Path:
    """Write a checkpoint in memory into the run's folder. Collective."""
    first = held.holders[0][0]
    keys = "meta", "layout", "config"
    meta, layout, text = from_all(
        mesh, lambda: [held.mine[0].header[key] for key in keys] if mesh.rank == first else []
    )[first]
    data = from_yaml(text, "the checkpoint in memory")
    tokenizer = open_data(data.data, data.seed, log if mesh.is_main else lambda _: None, mesh).tokenizer
    group: Any = dist.new_group(backend="gloo") if mesh.world_size > 1 else None
    tensors = _share(held, mesh)
    fill(tensors, held, mesh, group)
    if group is not None:
        dist.destroy_process_group(group)
    saving = replace(config.checkpoint, async_save=False)
    with closing(Checkpointer(saving, Path(config.run.dir).expanduser(), mesh, layout)) as checkpointer:
        return checkpointer.save(tensors, meta, text, tokenizer, log if mesh.is_main else lambda _: None)


def _share(held: Held, mesh: Mesh) -> dict[str, Tensor]:
    """Return this rank's share of the tensors, empty and whole: the largest first, each to the rank with the least."""
    sizes = {key: prod(boxes[0].shape) * getattr(torch, boxes[0].dtype).itemsize for key, boxes in held.boxes.items()}
    load, mine = [0] * mesh.world_size, {}
    for key in sorted(sizes, key=lambda each: (-sizes[each], each)):
        rank = load.index(min(load))
        load[rank] += sizes[key]
        if rank == mesh.rank:
            box = held.boxes[key][0]
            mine[key] = torch.empty(box.shape, dtype=getattr(torch, box.dtype))
    return mine
