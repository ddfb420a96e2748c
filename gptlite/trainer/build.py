"""What a run trains, built from the sections of its configuration: parts of the model, optimizer, passes.

Training, parity and the planner's simulation all build with these.
"""

import torch
from torch.optim import Optimizer

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.parallelize import parallelize
from gptlite.ops.select import Ops
from gptlite.optimizer.build import build_optimizer
from gptlite.optimizer.config import OptimizerConfig
from gptlite.optimizer.rounded import round_steps
from gptlite.optimizer.streamed import offload_state
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Policy


def build_parts(
    model: GPTConfig,
    parallelism: ParallelismConfig,
    mesh: Mesh,
    policy: Policy,
    ops: Ops,
    seed: int = 0,
    *,
    compile: bool = False,
) -> list[GPT]:
    """This rank's parts of the model, on the meta device."""
    with torch.device("meta"):
        whole = GPT(model, ops, seed)
    return parallelize(whole, mesh, parallelism, policy, compile=compile)


def build_updates(
    config: OptimizerConfig,
    parts: list[GPT],
    parallelism: ParallelismConfig,
    mesh: Mesh,
    policy: Policy,
    ops: Ops,
    seed: int = 0,
) -> Optimizer:
    """The optimizer of parts that have their memory, with what rounds, offloads or copies what it updates."""
    weights = [named for part in parts for named in part.named_weights()]
    optimizer = build_optimizer(config, weights, ops.adamw, parts[0].config.num_heads)
    if not policy.master_weights:
        optimizer = round_steps(optimizer, seed)
    return offload_state(optimizer, parallelism, mesh)
