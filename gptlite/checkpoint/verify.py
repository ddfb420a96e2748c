"""Every byte of a checkpoint compared with its manifest, by all ranks together."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from gptlite.checkpoint.manifest import Manifest, check_hashes, verify
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_all, from_main
from gptlite.progress import Log


def verify_together(folder: Path, log: Log, mesh: Mesh, agree: dist.ProcessGroup | None = None) -> Manifest:
    """`manifest.verify` with the files shared among the ranks, for one reads a large checkpoint for minutes.

    Rank 0's reading of the manifest counts. Raises DamagedCheckpoint, on all ranks what the first of them found.
    """
    if mesh.world_size == 1:
        return verify(folder, log)
    manifest = from_main(mesh, lambda: verify(folder, log, hashes=False), agree)
    load = [0] * mesh.world_size
    mine = []
    for name, entry in sorted(manifest.files.items(), key=lambda each: -each[1]["bytes"]):
        reader = load.index(min(load))
        load[reader] += entry["bytes"]
        if reader == mesh.rank:
            mine.append(name)
    from_all(mesh, lambda: check_hashes(folder, manifest, mine, log), agree)
    return manifest
