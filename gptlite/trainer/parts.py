"""Selection of ops, and construction of model parts and optimizer, from configuration sections.

Used by training, `gptlite parity` and the planner's simulation.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from gptlite.models.model import Model
from gptlite.models.parallelize import parallelize
from gptlite.ops.config import Implementation, OpsConfig
from gptlite.ops.select import Ops, select_ops
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import OptimizerConfig
from gptlite.optimizer.rounded import RoundedOptimizer
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import together
from gptlite.precision import Policy


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


def build_parts(
    model: Model,
    parallelism: ParallelismConfig,
    mesh: Mesh,
    policy: Policy,
    ops: Ops,
    seed: int = 0,
    *,
    compile: bool = False,
) -> list[nn.Module]:
    """Return this rank's parts of the model, parallelized, on the meta device."""
    return parallelize(model, model.build(ops, seed), mesh, parallelism, policy, compile=compile)


def build_updates(
    config: OptimizerConfig, model: Model, parts: Sequence[nn.Module], policy: Policy, ops: Ops, seed: int = 0
) -> Optimizer:
    """Build the optimizer for materialized parts, which rounds stochastically to bf16 weights if configured."""
    weights = [named for part in parts for named in model.named_weights(part)]
    optimizer = build_optimizer(config, weights, model.matrices(), ops.adamw, policy.compute_dtype)
    return optimizer if policy.master_weights else RoundedOptimizer(optimizer, seed)
