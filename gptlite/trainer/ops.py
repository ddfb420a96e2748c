"""The ops that all ranks take."""

from dataclasses import replace

from gptlite.ops.config import Implementation, OpsConfig
from gptlite.ops.select import Ops, select_ops
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import together


def agreed_ops(config: OpsConfig, mesh: Mesh, documents: bool = False) -> Ops:
    """The ops of a run, the same on all ranks: copies of a parameter must not drift apart by rounding. `documents`:
    attention is to keep to documents.

    Where some rank's machine cannot run what another's can, all take the reference. Raises ConfigError on all ranks
    where one cannot run what is asked for by name.
    """
    ops = together(mesh, lambda: select_ops(config, mesh.device, documents=documents))
    paths = gather_objects(mesh, replace(ops, reasons=()))
    if len(set(paths)) == 1:
        return ops
    others = next(rank for rank, path in enumerate(paths) if path != paths[0])
    reference = replace(config, implementation=Implementation.reference)
    plain = select_ops(reference, mesh.device, documents=documents)
    why = f"rank {others} cannot run the same kernels as rank 0, so all ranks take the reference"
    return replace(plain, reasons=(*plain.reasons, why))
