"""Faults of other frameworks that were reported in public, each with its analogue here, a name in BUGS or MUTATIONS."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Public:
    """`report`: where it was reported. `was`: what was wrong there. `fault`: its analogue; empty if there can be none,
    for the reason in `none`."""

    report: str
    was: str
    fault: str = ""
    none: str = ""


REPORTS = (
    Public(
        "NVIDIA/Megatron-LM#7452, finding 8",
        "attention sinks, sharded over heads, are left out of the clipping norm",
        "tensor: shards count on one rank in the norm",
    ),
    Public(
        "NVIDIA/Megatron-LM#7452, finding 7",
        "embeddings are scattered over another tensor group",
        "sequence: _Scatter.forward another axis's group",
    ),
    Public(
        "NVIDIA/Megatron-LM#7452, gathered logits",
        "a vocabulary-parallel loss takes replicated logits for shards, and adds the log of the degree",
        "tensor: TensorAxis.gather left out",
    ),
    Public(
        "NVIDIA/Megatron-LM#5916, first part",
        "the gradient norm omits experts if expert and tensor degrees exceed 1",
        "expert: the norm misses the experts beside tensor ranks",
    ),
    Public(
        "NVIDIA/Megatron-LM#5916, second part; #1628, #1622",
        "gradients of experts are summed over the data ranks of other parameters",
        "expert: foreach_reduce another axis's group",
    ),
    Public(
        "NVIDIA/Megatron-LM#6099",
        "Muon updates experts' parameters with shards of the wrong group",
        "optimizer: _exchange without the last rank",
    ),
    Public(
        "NVIDIA/Megatron-LM#7165",
        "gradients of experts are scaled by the size of a smaller group",
        "expert: gradients of weights are divided by the degree",
    ),
    Public(
        "NVIDIA/Megatron-LM#3768, #3672",
        "the router's losses grow with the tensor degree",
        "expert: the router's losses grow with the tensor degree",
    ),
    Public(
        "NVIDIA/Megatron-LM#3959",
        "an additional loss shrinks with the context degree",
        "expert: the router's losses shrink with the context degree",
    ),
    Public(
        "NVIDIA/Megatron-LM#1464, #1465",
        "gradients of attention are wrong with context parallelism",
        "context: gradients of keys and values are those of a rank's own queries",
    ),
    Public(
        "NVIDIA/Megatron-LM#673, #906; verl#6609",
        "losses are divided by the tokens of one context rank, so the norm grows with the degree",
        "context: the valid tokens are those of one chunk",
    ),
    Public(
        "NVIDIA/Megatron-LM#1736; pytorch/torchtitan#1750",
        "losses differ between tensor degrees",
        "tensor: ranks hold each other's shards",
    ),
    Public(
        "pytorch/pytorch#160285",
        "gradients of experts are doubled at an expert degree of 2",
        "expert: gradients of weights are doubled",
    ),
    Public(
        "pytorch/torchtitan#3412",
        "the gradient of the head's input stays a partial sum",
        "tensor: a column-parallel layer's input gradients are not summed",
    ),
    Public(
        "pytorch/torchtitan#1878",
        "the router's gradient is that of a rank's slice of the experts",
        "expert: the router's gradient is that of a rank's hidden units",
    ),
    Public(
        "pytorch/torchtitan#2318",
        "the gradient norm counts every replica of hybrid sharding",
        "zero: what copies hold counts on each in the norm",
    ),
    Public(
        "hpcaitech/ColossalAI#2192",
        "clipping omits the experts",
        "expert: the norm misses the experts",
    ),
    Public(
        "NVIDIA-NeMo/Megatron-Bridge#5634",
        "adapters of experts take a slice's sum for the whole",
        none="there are no adapters; the sum itself is `tensor: _Sum.forward`",
    ),
)
