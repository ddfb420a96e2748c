"""The GPT's plan: which submodule is cut along which axis, recomputed, compiled, and in what dtype it computes."""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gptlite.models.gpt.flops import head_flops, layer_flops
from gptlite.models.gpt.model import GPT, Block
from gptlite.models.layers import Head, LayerNorm, Linear
from gptlite.models.vocab_parallel import VocabParallelHead
from gptlite.ops.fp8 import fp8_linear
from gptlite.ops.weight_copies import keep_copies
from gptlite.parallelism.activation_offload import ActivationOffload
from gptlite.parallelism.chain import Chain
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.context import ContextAxis, context_axis
from gptlite.parallelism.layout import CONTEXT, num_stages, split_layers, splits_backward, stages_of_rank
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.pipeline import OnePart, Pipeline, add_across_ends
from gptlite.parallelism.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorAxis,
    VocabParallelEmbedding,
    axis_of,
    sum_sliced_gradients,
    tensor_axis,
)
from gptlite.parallelism.torch_private import KeptForAll, keep_fp32_gradients
from gptlite.parallelism.zero import shard
from gptlite.precision import Policy

IN_BLOCKS = (Linear, ColumnParallelLinear, RowParallelLinear)
MULTIPLYING = (*IN_BLOCKS, Head, VocabParallelHead)
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
    """This rank's parts of the pipeline, ready to be materialized; on one device the only part is the model itself.

    Order: pipeline, tensor, context, recomputation, compilation, ZeRO, as each wraps what the one before has made.
    """
    model.to(policy.parameter_dtype)
    parts = _cut_layers(model, mesh, config)
    split_backward = splits_backward(config)
    # A backward pass in two halves would run an overlapping layer's communication in both; compiled code is reordered
    # by the compiler.
    axis = tensor_axis(mesh, config.sequence, overlap=not (split_backward or compile))
    # What is computed again is gathered again with it, and compiled code knows no memory that comes and goes.
    context = context_axis(mesh, config.activation_checkpointing is ActivationCheckpointing.none and not compile)
    for part in parts:
        if axis is not None:
            _cut_tensors(part, axis)
        if split_backward:
            _plain_products(part)
        if context is not None:
            _cut_sequences(part, context)
        offload = ActivationOffload()
        for block in part.blocks():
            if config.activation_checkpointing is ActivationCheckpointing.offload:
                offload.wrap(block, first=block is part.blocks()[0])
            _recompute(block, config.activation_checkpointing, split_backward)
            if compile:
                block.compile()
        set_dtypes(part, policy)
        shard(part, part.blocks(), mesh, config, policy.gather_dtype, policy.reduce_dtype)
        if not policy.master_weights:
            keep_fp32_gradients(part)
    return parts


def set_dtypes(part: GPT, policy: Policy) -> None:
    """Tells a part's layers what they compute in."""
    part.compute_dtype = policy.stream_dtype
    part.varlen &= policy.stream_dtype in (torch.bfloat16, torch.float16)  # flash attention's
    for block in part.blocks():  # one kernel norms, adds and biases in one dtype
        block.deferred_add &= policy.stream_dtype == policy.compute_dtype and not policy.fp32_norms
    for module in part.modules():
        if isinstance(module, MULTIPLYING):
            module.matmul_dtype = None if policy.stream_dtype == policy.compute_dtype else policy.compute_dtype
        elif isinstance(module, LayerNorm):
            module.fp32 = policy.fp32_norms
        if policy.fp8 and isinstance(module, Linear):
            module.fp8 = True
        elif policy.fp8 and isinstance(module, IN_BLOCKS):
            module.multiply = fp8_linear  # type: ignore[method-assign]


def materialize(parts: list[GPT], device: torch.device) -> None:
    """Gives parameters built on the meta device their memory, uninitialised."""
    for part in parts:
        part.to_empty(device=device)
        part.tie()  # leaving the meta device makes every parameter anew, a shared one twice
        for parameter in part.parameters():
            parameter.grad_dtype = torch.float32  # sums over micro-batches and ranks, of bf16 parameters too


def copy_weights(parts: list[GPT], mesh: Mesh, policy: Policy) -> None:
    """Gives the weights that layers cast in each forward pass 16-bit copies, see ops/weight_copies.py: where one device
    holds them whole, in fp32. To be called once they have their memory."""
    if mesh.world_size > 1 or policy.compute_dtype.itemsize > 2:
        return
    for part in parts:
        dtypes: dict[nn.Parameter, torch.dtype] = {}
        for module in part.modules():
            if isinstance(module, MULTIPLYING):
                dtype = policy.compute_dtype
            elif isinstance(module, LayerNorm) and not module.fp32:
                dtype = policy.stream_dtype
            else:
                continue
            dtypes |= dict.fromkeys(module.parameters(recurse=False), dtype)
        keep_copies(part, {p: dtype for p, dtype in dtypes.items() if _is_cast(p, dtype, mesh)})


def _is_cast(parameter: nn.Parameter, dtype: torch.dtype, mesh: Mesh) -> bool:
    whole = not isinstance(parameter, DTensor) and parameter.device.type == mesh.device.type  # offloaded ones are not
    return whole and parameter.dtype == torch.float32 and dtype != parameter.dtype


def build_passes(
    chain: Chain, config: ParallelismConfig, *, micro_batches: int, micro_batch_size: int, sequence_length: int
) -> OnePart | Pipeline:
    """How a step runs forward and backward through this rank's parts, over that many micro-batches."""
    part = chain.parts[0]
    assert isinstance(part, GPT)
    if chain.mesh.size("pp") == 1:
        return OnePart(part, config.zero)
    length = sequence_length // chain.mesh.size(CONTEXT)
    tokens = (micro_batch_size, length)
    activations = (micro_batch_size, chain.slice_length(length), part.config.d_model)
    return Pipeline(chain.parts, chain.mesh, config, micro_batches, tokens, activations, part.compute_dtype)


def stage_layers(model: GPT, config: ParallelismConfig) -> list[range]:
    """The layers of each pipeline stage, balanced by FLOPs with the head on the last."""
    shape = model.config
    return split_layers(shape.num_layers, num_stages(config), layer_flops(shape), head_flops(shape))


@torch.no_grad()
def finish_gradients(parts: list[GPT], mesh: Mesh) -> None:
    """What no layer sums: gradients of slices of the sequence, over the tensor axis; a tied embedding's, over the ends.

    To be called once a step, after ZeRO's reduction and before clipping.
    """
    for part in parts:
        axis = axis_of(part)
        if axis is not None and axis.sequence:
            sum_sliced_gradients(part.parameters(), axis)
    if mesh.size("pp") > 1 and parts[0].config.tied_embeddings:
        first = next((part.token_embedding.weight for part in parts if part.token_embedding is not None), None)
        last = next((part.head.weight for part in parts if part.head is not None), None)
        add_across_ends(first, last, mesh)  # type: ignore[arg-type]


def _cut_layers(model: GPT, mesh: Mesh, config: ParallelismConfig) -> list[GPT]:
    if mesh.size("pp") == 1:
        return [model]
    layers = stage_layers(model, config)
    parts = []
    for stage in stages_of_rank(config, mesh.coordinate("pp")):
        part = copy.deepcopy(model)
        part.keep(layers[stage])
        parts.append(part)
    return parts


def _cut_tensors(part: GPT, axis: TensorAxis) -> None:
    part.tensor_axis = axis
    if part.token_embedding is not None:
        part.token_embedding = VocabParallelEmbedding(part.token_embedding, axis)  # type: ignore[arg-type]
    if part.head is not None:
        part.head = VocabParallelHead(part.head, axis)  # type: ignore[arg-type]
    part.tie()
    for block in part.blocks():
        block.tensor_axis = axis
        block.attn.qkv = ColumnParallelLinear(block.attn.qkv, axis)  # type: ignore[assignment]
        block.attn.proj = RowParallelLinear(block.attn.proj, axis)  # type: ignore[assignment]
        block.attn.first_head = axis.rank * (part.config.num_heads // axis.size)
        block.mlp.up = ColumnParallelLinear(block.mlp.up, axis)  # type: ignore[assignment]
        block.mlp.down = RowParallelLinear(block.mlp.down, axis)  # type: ignore[assignment]


def _plain_products(part: GPT) -> None:
    """Torch's own, where the input's gradient and the weight's are computed apart: a function of ours computes both."""
    for module in part.modules():
        if isinstance(module, Linear):
            module.fused = False


def _cut_sequences(part: GPT, context: ContextAxis) -> None:
    part.context = context
    for block in part.blocks():
        block.context = block.attn.context = context


def _recompute(block: Block, mode: ActivationCheckpointing, split_backward: bool) -> None:
    """Replaces a block's forward, so that its parameters keep their names. Dropout replays from its key."""
    if not mode.recomputes:
        return
    block.deferred_add = False  # a block's input is kept: one tensor, not the two of a sum that is left open
    forward = block.forward
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if mode is ActivationCheckpointing.selective:
        run = partial(run, context_fn=_keep_for_both_halves if split_backward else _keep)

    def recomputed(*args: object) -> object:  # a function, which torch.compile looks into: a partial stays eager
        return run(forward, *args)

    block.forward = recomputed  # type: ignore[method-assign]


def _keep() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _keep_for_both_halves() -> tuple[Any, Any]:
    forward, backward = _keep()
    return forward, KeptForAll(backward)


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    # Ours exist once the kernels are loaded; fp8 products have another name in each torch.
    kept = op in KEPT or str(op).startswith(("gptlite.attention", "aten._scaled_mm", "torch_attn._varlen_attn"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
