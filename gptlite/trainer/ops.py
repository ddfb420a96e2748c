"""Selection of ops that all ranks can run."""

from dataclasses import replace

from gptlite.ops.config import Implementation, OpsConfig
from gptlite.ops.select import Ops, select_ops
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import together


def agreed_ops(config: OpsConfig, mesh: Mesh, documents: bool = False) -> Ops:
    """Select the ops of a run, equal on all ranks. Otherwise, rounding differences would make parameter copies diverge.

    If the ranks would select different ops, all use the reference implementation. `documents` is True if attention is
    restricted to documents. Raises ConfigError on all ranks if any rank cannot run an op that is requested by name.
    """
    ops = together(mesh, lambda: select_ops(config, mesh.device, documents=documents))
    # `chosen` has reasons, which may differ with the hardware.
    paths = gather_objects(mesh, str(replace(ops, chosen=())))
    if len(set(paths)) == 1:
        return ops
    others = next(rank for rank, path in enumerate(paths) if path != paths[0])
    reference = replace(config, implementation=Implementation.reference)
    plain = select_ops(reference, mesh.device, documents=documents)
    why = f"rank {others} cannot run the same kernels as rank 0, so all ranks use the reference implementation"
    return replace(plain, note=why)
