"""Parallelization of a model's parts on a mesh: sharding, activation checkpointing, compilation and dtypes."""

import copy
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gptlite.errors import ConfigError
from gptlite.models.base import Cut
from gptlite.models.capabilities import BatchNorms, capability
from gptlite.models.layers import Head, Linear, ResidualNorm
from gptlite.models.metrics import Recording
from gptlite.models.model import Model
from gptlite.models.parallel_layers import HeadsNorm, VocabParallelHead
from gptlite.ops.weight_copies import keep_copies
from gptlite.parallelism.config import ACTIVATION_OFFLOADS, ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.context import ContextAxis, context_axis
from gptlite.parallelism.expert import ExpertWeights, expert_axis
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
from gptlite.parallelism.uneven import equalize_gradients
from gptlite.parallelism.zero import shard, sum_scalars
from gptlite.precision import Policy
from gptlite.torch_private.dispatch import KeptForAll, OnlyKept
from gptlite.torch_private.fsdp import keep_fp32_gradients
from gptlite.torch_private.modules import BatchNorm, compile_block, leave_meta

IN_BLOCKS = (Linear, ColumnParallelLinear, RowParallelLinear)
MULTIPLYING = (*IN_BLOCKS, ExpertWeights, Head, VocabParallelHead)
# Ops whose results selective checkpointing keeps: linear layers and, by name, attention. Pointwise ops are cheap to
# recompute. So are attention scores, given their memory (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
KEPT = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
KEPT_NAMES = (
    *("gptlite.attention", "aten._scaled_dot_product", "aten._flash_attention", "torch_attn._varlen_attn"),
    *("gptlite_experts.grouped_product", "aten._scaled_mm"),
)


def parallelize(
    model: Model, whole: nn.Module, mesh: Mesh, config: ParallelismConfig, policy: Policy, *, compile: bool = False
) -> list[nn.Module]:
    """Return this rank's parts of the pipeline, ready to be materialized. Without pipeline parallelism, the only part
    is `whole` itself.

    The order is pipeline, tensor, expert, context, activation checkpointing, compilation, ZeRO, since each wraps the
    result of the previous one.
    """
    for parameter in whole.parameters():  # buffers, such as running statistics, keep their dtype
        parameter.data = parameter.data.to(policy.parameter_dtype)
    parts = _cut_blocks(model, whole, mesh, config)
    split_backward = splits_backward(config)
    # If the backward pass is split, a layer that overlaps communication would communicate twice: in the pass for input
    # gradients and in that for weight gradients. If blocks are compiled, the compiler reorders their ops.
    axis = tensor_axis(mesh, config.sequence, overlap=not (split_backward or compile))
    # Gathered keys and values are freed, and gathered again for the backward pass, with two exceptions: recomputing a
    # block repeats the gather anyway, and compiled code does not support resizing a tensor's memory.
    context = context_axis(mesh, config.activation_checkpointing is ActivationCheckpointing.none and not compile)
    mode, among = config.activation_checkpointing, expert_axis(mesh)
    if (norms := capability(model.spec, BatchNorms)) is None:
        refuse_batch_norms(model, whole)
    for part in parts:
        if axis is not None:
            _cut_tensors(model, part, axis)
        experts = [module for module in part.modules() if isinstance(module, ExpertWeights)]
        if among is not None:
            for module in experts:
                module.share_(among)
        if norms is not None:
            norms.sync_batch_norms(part, mesh)
        if split_backward:
            _plain_products(part)
        if context is not None:
            _set_axis(part, "context", context)
        blocks = list(model.blocks(part).values())
        if compile:
            for module in part.modules():
                if getattr(module, "compiles", True) is False:
                    module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        if mode is ActivationCheckpointing.offload:
            import_module(ACTIVATION_OFFLOADS[-1]).offload_activations(blocks)
        for block in blocks:
            _recompute(model, block, mode, split_backward, among is not None)
            if compile:
                compile_block(block)  # in place, so that parameter names do not change
        set_dtypes(model, part, policy, recomputes=mode.recomputes)
        # Under autocast, GEMMs cast their operands, so parameters are gathered in their own dtype.
        gathered = policy.gather_dtype if model.autocast is None else policy.parameter_dtype
        shard(part, _gathered_alone(model, part, blocks), mesh, config, gathered, policy.reduce_dtype, experts)
        if not policy.master_weights:
            keep_fp32_gradients(part)
    return parts


def refuse_batch_norms(model: Model, whole: nn.Module) -> None:
    """Raise ConfigError for batch norms, which would average over the samples of each rank alone."""
    if any(isinstance(module, BatchNorm) for module in whole.modules()):
        raise ConfigError(f"the {model.spec.name} model has batch norms; let its spec extend ModelSpec as well")


def set_dtypes(model: Model, part: nn.Module, policy: Policy, *, recomputes: bool = False) -> None:
    """Set the dtypes of a part's layers. `recomputes`: blocks are recomputed in the backward pass."""
    model.spec.prepare(part, policy, recomputes)
    for module in part.modules():
        if isinstance(module, MULTIPLYING):
            module.matmul_dtype = None if policy.stream_dtype == policy.compute_dtype else policy.compute_dtype
        elif isinstance(module, ResidualNorm):
            module.fp32 = policy.fp32_norms
        if policy.fp8 and isinstance(module, Linear | ExpertWeights):
            module.fp8 = True
        elif policy.fp8 and isinstance(module, IN_BLOCKS):
            from gptlite.ops.fp8 import fp8_linear

            module.multiply = partial(fp8_linear, fused=module.fused)  # type: ignore[method-assign]
        elif policy.fp8 and hasattr(module, "notes_amax"):
            module.notes_amax = True  # type: ignore[assignment]
        elif policy.fp8_head and isinstance(module, Head | VocabParallelHead):
            module.fp8 = True


def materialize(model: Model, parts: Sequence[nn.Module], device: torch.device) -> None:
    """Allocate uninitialized memory for parameters on the meta device. Those that are in files have left it."""
    for part in parts:
        leave_meta(part, device)
        model.tie(part)  # `leave_meta` creates new parameters, two of them for a shared one
        for parameter in part.parameters():
            parameter.grad_dtype = torch.float32  # even bf16 parameters have fp32 sums over micro-batches and ranks


def copy_weights(parts: Sequence[nn.Module], mesh: Mesh, policy: Policy) -> None:
    """Create 16-bit copies of the weights that layers would cast in each forward pass; see ops/weight_copies.py.

    Does nothing unless a single device holds all weights, in fp32. Call it after `materialize`.
    """
    if mesh.world_size > 1 or policy.compute_dtype.itemsize > 2:
        return
    for part in parts:
        dtypes: dict[nn.Parameter, torch.dtype] = {}
        for module in part.modules():
            if isinstance(module, MULTIPLYING):
                dtype = policy.compute_dtype
            elif isinstance(module, ResidualNorm) and not module.fp32:
                dtype = policy.stream_dtype
            else:
                continue
            dtypes |= dict.fromkeys(module.parameters(recurse=False), dtype)
        keep_copies(part, {p: dtype for p, dtype in dtypes.items() if _is_cast(p, dtype, mesh)})


def _is_cast(parameter: nn.Parameter, dtype: torch.dtype, mesh: Mesh) -> bool:
    whole = not isinstance(parameter, DTensor) and parameter.device.type == mesh.device.type  # not offloaded
    return whole and parameter.dtype == torch.float32 and dtype != parameter.dtype


def build_passes(
    model: Model,
    runner: StageRunner,
    config: ParallelismConfig,
    *,
    micro_batches: int,
    micro_batch_size: int,
    sequence_length: int,
    example: torch.Tensor | None = None,
) -> OnePart | Pipeline:
    """Return the object that runs a step's forward and backward passes through this rank's parts, over `micro_batches`.

    `example`: a tensor with the shape and dtype of one sample's input, if that is not a sequence of tokens.
    """
    forward = Recording(model.spec, model.forward) if model.spec.metrics else model.forward
    if runner.mesh.size("pp") == 1:
        return OnePart(forward, runner.parts[0], config.zero)
    length = sequence_length // runner.mesh.size(CONTEXT)
    shape, dtype = ((length,), torch.int64) if example is None else (example.shape, example.dtype)
    tokens = torch.empty((micro_batch_size, *shape), dtype=dtype, device="meta")
    shapes = model.boundaries(tokens, runner.slice_length(length), runner.num_stages)
    between = [torch.empty(shape, dtype=model.dtype, device="meta", requires_grad=True) for shape in shapes[1:]]
    return Pipeline(forward, runner.parts, runner.mesh, config, micro_batches, [tokens, *between])


@torch.no_grad()
def finish_gradients(model: Model, parts: Sequence[nn.Module], mesh: Mesh) -> torch.Tensor | None:
    """Sum the gradients that are still partial. Over the data axes, these are those of parameters without dims. Over
    the tensor axis, they come from slices of the sequence, or from some of the heads. Over the first and the last
    pipeline stage, they are those of tied parameters.

    Call it once per step, after ZeRO's reduction and before clipping. It also calls BaseSpec.end_step and returns the
    result of that method.
    """
    sum_scalars((parameter for part in parts for parameter in part.parameters()), mesh)
    for part in parts:
        axis = axis_of(part) if mesh.size("tp") > 1 else None
        if axis is not None:
            of_heads = (module for module in part.modules() if getattr(module, "of_heads", False) is True)
            partial = part.parameters() if axis.sequence else (p for module in of_heads for p in module.parameters())
            sum_sliced_gradients(partial, axis)
            equalize_gradients(list(part.parameters()), axis, mesh)
    if mesh.size("pp") > 1:
        for first, last in model.tied_copies(parts):
            add_across_ends(first, last, mesh)
    return model.spec.end_step(model.config, parts, mesh)


def _cut_blocks(model: Model, whole: nn.Module, mesh: Mesh, config: ParallelismConfig) -> list[nn.Module]:
    if mesh.size("pp") == 1:
        return [whole]
    blocks = model.stage_blocks(num_stages(config))
    parts = []
    for stage in stages_of_rank(config, mesh.coordinate("pp")):
        part = copy.deepcopy(whole)  # on the meta device: no data is copied
        model.spec.keep(part, model.config, blocks[stage])
        parts.append(part)
    return parts


def _gathered_alone(model: Model, part: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks without tied parameters. ZeRO gathers each of these blocks separately. FSDP2 would untie a
    parameter from its copy in another block, so all other blocks are gathered with the rest of the part."""
    tied = {id(each) for name, each in part.named_parameters(remove_duplicate=False) if name in model.tied}
    return [block for block in blocks if tied.isdisjoint(map(id, block.parameters()))]


def layers_to_cut(model: Model, part: nn.Module) -> list[tuple[str, Cut]]:
    """Return the layers of a part that the model's sharding plan names, with the kind of sharding over the tensor
    axis."""
    plan = [(pattern.split("."), cut) for pattern, cut in model.spec.cuts(model.config).items()]

    def matches(pattern: list[str], name: list[str]) -> bool:
        return len(name) == len(pattern) and all(
            each in ("*", component) for each, component in zip(pattern, name, strict=True)
        )

    return [
        (name, cut) for name, _ in part.named_modules() for pattern, cut in plan if matches(pattern, name.split("."))
    ]


def _cut_tensors(model: Model, part: nn.Module, axis: TensorAxis) -> None:
    """Replace the layers that the model's sharding plan names with tensor-parallel ones."""
    for name, cut in layers_to_cut(model, part):
        path, _, last = name.rpartition(".")
        setattr(part.get_submodule(path), last, _shared(part.get_submodule(name), cut, axis))
    model.tie(part)
    _set_axis(part, "tensor_axis", axis)


def _shared(layer: Any, cut: Cut, axis: TensorAxis) -> nn.Module:
    match cut:
        case Cut.column if isinstance(layer, HeadsNorm):
            return layer.cut_(axis)
        case Cut.column:
            return ColumnParallelLinear(layer, axis)
        case Cut.row:
            return RowParallelLinear(layer, axis)
        case Cut.experts:
            return layer.cut_(axis)
        case Cut.vocabulary if isinstance(layer, Head):
            return VocabParallelHead(layer, axis)
        case Cut.vocabulary:
            return VocabParallelEmbedding(layer, axis)


def _set_axis(part: nn.Module, name: str, axis: TensorAxis | ContextAxis) -> None:
    """Set an axis on every module that has an attribute of that name."""
    for module in part.modules():
        if hasattr(module, name):
            setattr(module, name, axis)


def _plain_products(part: nn.Module) -> None:
    """Switch linear layers to torch's own GEMMs, which can compute the gradients of input and weight separately. The
    fused function computes both in one backward call."""
    for module in part.modules():
        if isinstance(module, Linear):
            module.fused = False


def _recompute(
    model: Model, block: nn.Module, mode: ActivationCheckpointing, split_backward: bool, gathers: bool
) -> None:
    """Wrap a block's forward method in activation checkpointing. The parameters keep their names.

    `gathers`: ZeRO gathers some of the parameters inside the block. If dropout masks are not recomputed from their
    keys, the generator's state is restored.
    """
    if not mode.recomputes:
        return
    norms, forward = capability(model.spec, BatchNorms), block.forward
    once = (lambda: forward) if norms is None else norms.tracking_once(block, forward)
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=not model.spec.keyed_dropout)
    if mode is ActivationCheckpointing.selective:
        run = partial(run, context_fn=partial(_keep, split_backward, gathers))

    def recomputed(*args: Any, **kwargs: Any) -> Any:  # torch.compile does not trace into a partial
        return run(once(), *args, **kwargs)

    block.forward = recomputed  # type: ignore[method-assign]


def _keep(split_backward: bool, gathers: bool) -> tuple[Any, Any]:
    """Return the context managers of selective checkpointing: for the forward pass and for its recomputation."""
    forward, backward = create_selective_checkpoint_contexts(_policy)
    if gathers:
        forward, backward = OnlyKept(forward, is_kept), OnlyKept(backward, is_kept)
    return forward, KeptForAll(backward) if split_backward else backward


def is_kept(op: object) -> bool:
    """Return True if selective checkpointing keeps the op's result."""
    # By name, since our ops exist only once the kernels are loaded, and names of fp8 GEMMs vary by torch version.
    return op in KEPT or str(op).startswith(KEPT_NAMES)


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE
