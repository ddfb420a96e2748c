"""A model's parts on a mesh: what is cut along which axis, recomputed, compiled, and in what dtype it computes."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gptlite.models.layers import Head, LayerNorm, Linear
from gptlite.models.model import Model
from gptlite.models.spec import Cut
from gptlite.models.vocab_parallel import VocabParallelHead
from gptlite.ops.fp8 import fp8_linear
from gptlite.ops.weight_copies import keep_copies
from gptlite.parallelism.activation_offload import ActivationOffload
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.context import ContextAxis, context_axis
from gptlite.parallelism.layout import CONTEXT, num_stages, splits_backward, stages_of_rank
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.pipeline import OnePart, Pipeline, add_across_ends
from gptlite.parallelism.stage_runner import StageRunner
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
    model: Model, whole: nn.Module, mesh: Mesh, config: ParallelismConfig, policy: Policy, *, compile: bool = False
) -> list[nn.Module]:
    """This rank's parts of the pipeline, ready to be materialized; on one device the only part is the `whole` itself.

    Order: pipeline, tensor, context, recomputation, compilation, ZeRO, as each wraps what the one before has made.
    """
    whole.to(policy.parameter_dtype)
    parts = _cut_blocks(model, whole, mesh, config)
    split_backward = splits_backward(config)
    # A backward pass in two halves would run an overlapping layer's communication in both; compiled code is reordered
    # by the compiler.
    axis = tensor_axis(mesh, config.sequence, overlap=not (split_backward or compile))
    # What is computed again is gathered again with it, and compiled code knows no memory that comes and goes.
    context = context_axis(mesh, config.activation_checkpointing is ActivationCheckpointing.none and not compile)
    mode = config.activation_checkpointing
    for part in parts:
        if axis is not None:
            _cut_tensors(model, part, axis)
        if split_backward:
            _plain_products(part)
        if context is not None:
            _tell(part, "context", context)
        offload, blocks = ActivationOffload(), list(model.blocks(part).values())
        for block in blocks:
            if mode is ActivationCheckpointing.offload:
                offload.wrap(block, first=block is blocks[0])
            _recompute(block, mode, split_backward)
            if compile:
                block.compile()
        set_dtypes(model, part, policy, recomputes=mode.recomputes)
        # Under autocast the products cast, and parameters are gathered as they are.
        gathered = policy.gather_dtype if model.autocast is None else policy.parameter_dtype
        shard(part, blocks, mesh, config, gathered, policy.reduce_dtype)
        if not policy.master_weights:
            keep_fp32_gradients(part)
    return parts


def set_dtypes(model: Model, part: nn.Module, policy: Policy, *, recomputes: bool = False) -> None:
    """Tells a part's layers what they compute in. `recomputes`: blocks are computed again in the backward pass."""
    model.spec.prepare(part, policy, recomputes)
    for module in part.modules():
        if isinstance(module, MULTIPLYING):
            module.matmul_dtype = None if policy.stream_dtype == policy.compute_dtype else policy.compute_dtype
        elif isinstance(module, LayerNorm):
            module.fp32 = policy.fp32_norms
        if policy.fp8 and isinstance(module, Linear):
            module.fp8 = True
        elif policy.fp8 and isinstance(module, IN_BLOCKS):
            module.multiply = fp8_linear  # type: ignore[method-assign]


def materialize(model: Model, parts: Sequence[nn.Module], device: torch.device) -> None:
    """Gives parameters built on the meta device their memory, uninitialised."""
    for part in parts:
        part.to_empty(device=device)
        model.tie(part)  # leaving the meta device makes every parameter anew, a shared one twice
        for parameter in part.parameters():
            parameter.grad_dtype = torch.float32  # sums over micro-batches and ranks, of bf16 parameters too


def copy_weights(parts: Sequence[nn.Module], mesh: Mesh, policy: Policy) -> None:
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
    model: Model,
    runner: StageRunner,
    config: ParallelismConfig,
    *,
    micro_batches: int,
    micro_batch_size: int,
    sequence_length: int,
) -> OnePart | Pipeline:
    """How a step runs forward and backward through this rank's parts, over that many micro-batches."""
    if runner.mesh.size("pp") == 1:
        return OnePart(model.forward, runner.parts[0], config.zero)
    length = sequence_length // runner.mesh.size(CONTEXT)
    tokens = (micro_batch_size, length)
    activations = model.activations(micro_batch_size, runner.slice_length(length))
    return Pipeline(model.forward, runner.parts, runner.mesh, config, micro_batches, tokens, activations, model.dtype)


@torch.no_grad()
def finish_gradients(model: Model, parts: Sequence[nn.Module], mesh: Mesh) -> None:
    """What no layer sums: gradients of slices of the sequence, over the tensor axis; a tied parameter's, over the ends.

    To be called once a step, after ZeRO's reduction and before clipping.
    """
    for part in parts:
        axis = axis_of(part)
        if axis is not None and axis.sequence:
            sum_sliced_gradients(part.parameters(), axis)
    if mesh.size("pp") > 1:
        for first, last in model.tied_copies(parts):
            add_across_ends(first, last, mesh)


def _cut_blocks(model: Model, whole: nn.Module, mesh: Mesh, config: ParallelismConfig) -> list[nn.Module]:
    if mesh.size("pp") == 1:
        return [whole]
    blocks = model.stage_blocks(num_stages(config))
    parts = []
    for stage in stages_of_rank(config, mesh.coordinate("pp")):
        part = copy.deepcopy(whole)
        model.spec.keep(part, model.config, blocks[stage])
        parts.append(part)
    return parts


def layers_to_cut(model: Model, part: nn.Module) -> list[tuple[str, Cut]]:
    """The layers of a part that the model's sharding plan names, and how the tensor axis shares each."""
    plan = [(pattern.split("."), cut) for pattern, cut in model.spec.cuts(model.config).items()]

    def matches(pattern: list[str], name: list[str]) -> bool:
        return len(name) == len(pattern) and all(each in ("*", its) for each, its in zip(pattern, name, strict=True))

    return [
        (name, cut) for name, _ in part.named_modules() for pattern, cut in plan if matches(pattern, name.split("."))
    ]


def _cut_tensors(model: Model, part: nn.Module, axis: TensorAxis) -> None:
    """Swaps the layers that the model's sharding plan names for those that share their work over the axis."""
    for name, cut in layers_to_cut(model, part):
        path, _, last = name.rpartition(".")
        setattr(part.get_submodule(path), last, _shared(part.get_submodule(name), cut, axis))
    model.tie(part)
    _tell(part, "tensor_axis", axis)


def _shared(layer: Any, cut: Cut, axis: TensorAxis) -> nn.Module:
    match cut:
        case Cut.column:
            return ColumnParallelLinear(layer, axis)
        case Cut.row:
            return RowParallelLinear(layer, axis)
        case Cut.vocabulary if isinstance(layer, Head):
            return VocabParallelHead(layer, axis)
        case Cut.vocabulary:
            return VocabParallelEmbedding(layer, axis)


def _tell(part: nn.Module, name: str, axis: TensorAxis | ContextAxis) -> None:
    """Sets an axis on the modules that ask for it by having an attribute of that name."""
    for module in part.modules():
        if hasattr(module, name):
            setattr(module, name, axis)


def _plain_products(part: nn.Module) -> None:
    """Torch's own, where the input's gradient and the weight's are computed apart: a function of ours computes both."""
    for module in part.modules():
        if isinstance(module, Linear):
            module.fused = False


def _recompute(block: nn.Module, mode: ActivationCheckpointing, split_backward: bool) -> None:
    """Replaces a block's forward, so that its parameters keep their names. Dropout replays from its key."""
    if not mode.recomputes:
        return
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


def is_kept(op: object) -> bool:
    """Whether selective checkpointing keeps an op's result."""
    # Ours exist once the kernels are loaded; fp8 products have another name in each torch.
    return op in KEPT or str(op).startswith(("gptlite.attention", "aten._scaled_mm", "torch_attn._varlen_attn"))


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE
