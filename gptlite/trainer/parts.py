"""Construction of model parts and optimizer from configuration sections.

Used by training, `gptlite parity` and the planner's simulation.
"""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from gptlite.models.model import Model
from gptlite.models.parallelize import parallelize
from gptlite.ops.select import Ops
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import OptimizerConfig
from gptlite.optimizer.rounded import RoundedOptimizer
from gptlite.optimizer.streamed import offload_state
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Policy


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
    config: OptimizerConfig,
    model: Model,
    parts: Sequence[nn.Module],
    parallelism: ParallelismConfig,
    mesh: Mesh,
    policy: Policy,
    ops: Ops,
    seed: int = 0,
) -> Optimizer:
    """Build the optimizer for materialized parts, wrapped for stochastic rounding and offload if configured."""
    weights = [named for part in parts for named in model.named_weights(part)]
    matrices = model.matrices()  # which parameters Muon splits, and which it leaves to AdamW
    structure = matrices.edges, matrices.fused
    others = config.left_to_adamw((name for name, _ in weights), matrices.embeddings)
    optimizer = build_optimizer(config, weights, ops.adamw, *structure, policy.compute_dtype, matrices.batched, others)
    if not policy.master_weights:
        optimizer = RoundedOptimizer(optimizer, seed)
    return offload_state(optimizer, parallelism, mesh)
