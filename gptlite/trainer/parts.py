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
    config: OptimizerConfig, model: Model, parts: Sequence[nn.Module], policy: Policy, ops: Ops, seed: int = 0
) -> Optimizer:
    """Build the optimizer for materialized parts, which rounds stochastically to bf16 weights if configured."""
    weights = [named for part in parts for named in model.named_weights(part)]
    optimizer = build_optimizer(config, weights, model.matrices(), ops.adamw, policy.compute_dtype)
    return optimizer if policy.master_weights else RoundedOptimizer(optimizer, seed)
