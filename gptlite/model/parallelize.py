"""The GPT's plan: which submodule is cut, recomputed, compiled, and in what dtype it computes."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gptlite.model.gpt import GPT
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Policy

# What selective checkpointing keeps: the linear layers and SDPA. Pointwise ops are cheap to make again, and so, for
# the memory they take, are written-out attention scores (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def parallelize(
    model: GPT, mesh: Mesh, config: ParallelismConfig, policy: Policy, *, compile: bool = False
) -> list[GPT]:
    """This rank's parts of the pipeline, ready to be materialized. Order: recomputation, compilation, precision.

    `mesh` decides how the model is cut; on one device the only part is the whole.
    """
    if mesh.world_size != 1:
        raise ValueError(f"a mesh of {mesh.world_size} ranks: this version runs one device")
    for block in model.layers.values():
        _recompute(block, config.activation_checkpointing)
        if compile:
            block.compile()
    model.compute_dtype = policy.compute_dtype
    return [model]


def materialize(parts: list[GPT], device: torch.device) -> None:
    """Gives parameters built on the meta device their memory, uninitialised."""
    for part in parts:
        part.to_empty(device=device)
        part.tie()  # leaving the meta device makes every parameter anew, a shared one twice


def _recompute(block: nn.Module, mode: ActivationCheckpointing) -> None:
    """Replaces a block's forward, so that its parameters keep their names. Dropout replays from its key."""
    if mode is ActivationCheckpointing.none:
        return
    forward = block.forward
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if mode is ActivationCheckpointing.selective:
        run = partial(run, context_fn=partial(create_selective_checkpoint_contexts, _policy))

    def recomputed(*args: object) -> object:  # a function, which torch.compile looks into: a partial stays eager
        return run(forward, *args)

    block.forward = recomputed


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
