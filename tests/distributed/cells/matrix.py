"""The layouts that are compared with one process: covers of the legal combinations, and what no cover has."""

from __future__ import annotations

from dataclasses import replace

from distributed.cells.cover import chosen, crossed
from distributed.cells.layouts import Cell

SIX_HEADS = ("model.num_heads=6", "model.d_model=48", "model.sequence_length=24")
# What the axes above leave out.
MORE: list[Cell] = [
    # Three data ranks, and a pipeline of three and of six: nothing divides evenly.
    Cell(tensor=2, data=3),
    Cell(tensor=2, data=3, vocabulary="uneven"),
    Cell(tensor=2, data=3, zero=1, accumulation=4, sequence=True, vocabulary="uneven"),
    Cell(tensor=2, data=3, zero=2, accumulation=2, tied=False, vocabulary="uneven"),
    Cell(tensor=2, data=3, zero=3, accumulation=4, sequence=True, checkpointing="selective"),
    Cell(pipeline=2, data=3, zero=2, schedule="1f1b", accumulation=4, vocabulary="uneven"),
    Cell(pipeline=2, data=3, zero=3, schedule="zbv", accumulation=4),
    Cell(tensor=2, pipeline=3, schedule="1f1b", accumulation=3, tied=False),
    Cell(pipeline=3, data=2, zero=3, schedule="interleaved_1f1b", accumulation=3, checkpointing="full"),
    Cell(pipeline=6, schedule="1f1b", accumulation=8),
    # Micro-batches that fill a V, and two rounds of interleaving.
    Cell(pipeline=4, data=2, zero=3, schedule="zbv", accumulation=8),
    Cell(pipeline=4, data=2, zero=2, schedule="interleaved_1f1b", accumulation=8, tied=False),
    # Micro-batches beyond MOST_MESSAGES.
    Cell(tensor=8, accumulation=3),
    Cell(tensor=8, accumulation=3, sequence=True, tied=False, vocabulary="uneven", checkpointing="selective"),
    # Shards in copies (HSDP).
    Cell(data=4, replicate=2, zero=1, accumulation=3),
    Cell(data=4, replicate=2, zero=3, accumulation=3, tensor=2, sequence=True, vocabulary="uneven"),
    Cell(data=4, replicate=2, zero=2, accumulation=4, pipeline=2, schedule="1f1b"),
    Cell(data=4, replicate=2, zero=3, accumulation=4, pipeline=2, schedule="zero_bubble", tied=False),
    Cell(data=8, replicate=4, zero=3, vocabulary="uneven"),
    # bf16, judged by the one-process bf16 run.
    Cell(data=8, zero=1, precision="bf16"),
    Cell(data=8, zero=3, accumulation=3, tied=False, precision="bf16"),
    Cell(tensor=8, precision="bf16", vocabulary="uneven"),
    Cell(tensor=4, data=2, zero=2, accumulation=3, sequence=True, precision="bf16"),
    Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="1f1b", accumulation=4, sequence=True, precision="bf16"),
    Cell(pipeline=4, data=2, zero=2, schedule="zbv", accumulation=8, precision="bf16"),
    Cell(tensor=2, pipeline=4, schedule="interleaved_1f1b", accumulation=4, tied=False, precision="bf16"),
    # ZeRO where there is nothing to shard over.
    Cell(tensor=2, pipeline=2, zero=3, schedule="1f1b", accumulation=3),
    # The other keys of a layout.
    Cell(data=4, zero=3, accumulation=3, more=("parallelism.bucket_layers=3", "parallelism.prefetch=2")),
    Cell(
        pipeline=2,
        data=2,
        zero=1,
        schedule="interleaved_1f1b",
        accumulation=4,
        shared=("model.num_layers=8",),
        more=("parallelism.virtual_stages=4",),
    ),
    Cell(pipeline=4, schedule="zero_bubble", accumulation=8, more=("parallelism.virtual_stages=1",)),
    # Other models: no biases; sequences shorter than the positions; fewer rows of vocabulary than ranks need.
    Cell(tensor=2, pipeline=2, schedule="zbv", accumulation=3, sequence=True, shared=("model.bias=false",)),
    Cell(tensor=4, sequence=True, shared=("data.sequence_length=8",)),
    Cell(tensor=8, vocabulary="uneven", shared=("data.vocab_size=9",)),
    Cell(tensor=2, data=2, zero=3, accumulation=3, shared=("model.dropout=0.0", "optimizer=sgd")),
]
# Where fp16 computes, judged by the one-process run in the same precision.
FP16 = [
    Cell(data=8, zero=1, precision="fp16"),
    Cell(data=8, zero=3, accumulation=3, tied=False, precision="fp16"),
    Cell(tensor=8, precision="fp16", vocabulary="uneven"),
    Cell(tensor=2, pipeline=2, data=2, zero=2, schedule="1f1b", accumulation=4, sequence=True, precision="fp16"),
    Cell(pipeline=4, data=2, zero=2, schedule="zbv", accumulation=8, precision="fp16"),
    Cell(tensor=2, pipeline=4, schedule="interleaved_1f1b", accumulation=4, tied=False, precision="fp16"),
    Cell(data=4, replicate=2, zero=3, tensor=2, accumulation=3, checkpointing="selective", precision="fp16"),
    Cell(data=8, zero=0, accumulation=3, precision="amp_o1"),
    Cell(data=8, zero=3, checkpointing="full", vocabulary="uneven", precision="amp_o1"),
    Cell(tensor=4, data=2, zero=2, accumulation=3, sequence=True, tied=False, precision="amp_o1"),
    Cell(tensor=2, pipeline=2, data=2, zero=1, schedule="zero_bubble", accumulation=4, precision="amp_o1"),
    Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="1f1b", accumulation=4, sequence=True, precision="amp_o1"),
    Cell(pipeline=4, data=2, zero=2, schedule="zbv", accumulation=8, precision="amp_o1"),
    Cell(data=8, zero=1, accumulation=3, precision="amp_o2"),
    Cell(data=8, zero=3, tied=False, vocabulary="uneven", precision="amp_o2"),
    Cell(tensor=8, sequence=True, checkpointing="selective", precision="amp_o2"),
    Cell(tensor=2, pipeline=2, data=2, zero=2, schedule="zbv", accumulation=4, sequence=True, precision="amp_o2"),
    Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="1f1b", accumulation=4, precision="amp_o2"),
    Cell(tensor=2, pipeline=4, schedule="gpipe", accumulation=3, checkpointing="full", precision="amp_o2"),
]
# Compiling takes a minute each.
COMPILED = [
    Cell(tensor=2, sequence=True, more=("trainer.compile=true",)),
    Cell(data=2, zero=3, accumulation=3, checkpointing="full", more=("trainer.compile=true",)),
    Cell(pipeline=2, schedule="1f1b", accumulation=3, more=("trainer.compile=true",)),
]
# Offload with every stage of ZeRO, over tensor and pipeline degrees: each is, besides, to the bit what it is without.
OFFLOADED = [
    Cell(
        tensor=tensor,
        pipeline=pipeline,
        data=8 // (tensor * pipeline),
        zero=zero,
        schedule=schedule,
        sequence=tensor > 1 and zero % 2 == 1,
        tied=(zero + pipeline) % 2 == 1,
        vocabulary="uneven" if zero > 1 else "padded",
        accumulation=4,
        offload=offload,
    )
    for tensor, pipeline, schedule in ((2, 2, "1f1b"), (1, 1, "none"), (2, 1, "none"), (1, 2, "zbv"), (1, 4, "1f1b"))
    for zero in (3, 0, 2, 1)
    for offload in ("cpu", "nvme")
] + [
    Cell(data=4, replicate=2, zero=3, tensor=2, accumulation=3, offload="nvme"),
    Cell(data=8, zero=3, accumulation=3, precision="bf16", offload="cpu"),
    Cell(data=8, zero=1, accumulation=3, precision="bf16", offload="nvme"),
    Cell(tensor=4, pipeline=2, schedule="1f1b", zero=3, accumulation=3, offload="nvme"),
]
CHOSEN = chosen(104)
# Sequences cut over ranks: dropout, positions, loss and gradients with all else.
CONTEXT = chosen(40, context=True)
MORE_CONTEXT = [
    Cell(context=2),
    Cell(context=2, data=2, zero=1, accumulation=3, tied=False),
    Cell(context=4, tensor=1, zero=3, accumulation=3, vocabulary="uneven"),
    Cell(context=2, data=3, zero=3, accumulation=4),
    # Shards in copies (HSDP), each cut over the ranks of a sequence too.
    Cell(context=2, data=4, replicate=2, zero=1, accumulation=3),
    Cell(context=2, data=4, replicate=4, zero=3, accumulation=3, checkpointing="full"),
    Cell(context=2, data=2, replicate=2, pipeline=2, zero=2, schedule="zero_bubble", accumulation=4),
    # A slice between tensor-parallel layers that has some of both chunks.
    Cell(context=2, tensor=3, sequence=True, accumulation=3, shared=SIX_HEADS),
    Cell(context=2, tensor=3, sequence=True, shared=(*SIX_HEADS, "ops=reference"), checkpointing="selective"),
    # Other ways to compute attention, with dropout and without.
    Cell(context=4, accumulation=3, shared=("ops=reference",)),
    Cell(context=4, data=2, zero=2, accumulation=3, shared=("ops=reference", "model.dropout=0.0")),
    *(
        Cell(context=2, tensor=2, accumulation=3, shared=("model.dropout=0.0",), more=(f"ops.attention={attention}",))
        for attention in ("sdpa", "matmul", "fused", "fused_softmax")
    ),
    Cell(context=4, pipeline=2, schedule="zbv", zero=3, accumulation=4, shared=("model.dropout=0.0",)),
    Cell(context=4, zero=1, shared=("data.sequence_length=8", "model.bias=false")),
    # bf16, judged by the one-process bf16 run.
    Cell(context=2, precision="bf16"),
    Cell(context=4, data=2, zero=3, accumulation=3, precision="bf16"),
    Cell(context=2, tensor=2, pipeline=2, zero=2, schedule="1f1b", accumulation=4, sequence=True, precision="bf16"),
]
COMPILED += [
    Cell(context=2, more=("trainer.compile=true",)),
    Cell(context=2, tensor=2, zero=3, sequence=True, checkpointing="full", more=("trainer.compile=true",)),
]
# Sequences cut, state elsewhere and 16 bits, all with one another and with every other axis.
CROSSED = crossed()
# Architectures of today, each with every other axis.
ROPE = ("model.position=rope", "model.norm=rms_norm", "model.bias=false")
LLAMA = (*ROPE, "model.mlp=swiglu", "model.num_heads=16", "model.kv_heads=8", "model.head_dim=4")
QWEN = (*ROPE, "model.mlp=geglu", "model.kv_heads=8", "model.head_dim=6", "model.qk_norm=true", "model.rope_scaling=4")
RELU2 = (*ROPE, "model.norm_gain=false", "model.mlp=relu2", "model.qk_norm=true", "model.softcap=15")
MODERN = [
    replace(cell, shared=family)
    for seed, family in enumerate((LLAMA, QWEN, RELU2), 5)
    for cell in [*chosen(20, seed=seed), *chosen(5, seed=seed, context=True)]
]
WINDOWS = (*ROPE, "model.windows=[5,0]", "model.mlp=relu2")
MODERN += [replace(cell, shared=WINDOWS) for cell in [*chosen(5, seed=8), *chosen(3, seed=8, context=True)]]
# More tensor-parallel ranks than heads of keys, which they copy.
COPIED = (*ROPE, "model.mlp=swiglu", "model.num_heads=16", "model.kv_heads=2", "model.head_dim=4", "model.qk_norm=true")
ONE_KEY = (*COPIED, "model.kv_heads=1", "model.head_dim=8")
MODERN += [
    Cell(tensor=8, shared=COPIED),
    Cell(tensor=8, sequence=True, accumulation=3, checkpointing="full", shared=COPIED),
    Cell(tensor=4, data=2, zero=3, accumulation=3, shared=(*COPIED, "model.bias=true")),
    Cell(tensor=4, pipeline=2, schedule="zbv", accumulation=4, sequence=True, shared=COPIED),
    Cell(tensor=4, context=2, zero=2, accumulation=3, sequence=True, checkpointing="selective", shared=COPIED),
    Cell(tensor=4, data=2, zero=1, accumulation=3, precision="bf16", shared=COPIED),
    Cell(tensor=4, data=2, zero=3, shared=(*COPIED, "optimizer=muon"), vocabulary="uneven"),
    Cell(tensor=4, pipeline=2, schedule="1f1b", accumulation=4, shared=ONE_KEY),
]
COMPILED += [Cell(tensor=4, sequence=True, shared=COPIED, more=("trainer.compile=true",))]
# Values that stages pass on.
VALUES = ("model.value_residual=true",)
MIXED = [
    *(replace(cell, shared=(*LLAMA, *VALUES)) for cell in [*chosen(8, seed=9), *chosen(4, seed=9, context=True)]),
    Cell(tensor=2, pipeline=4, schedule="1f1b", accumulation=4, shared=VALUES),
    Cell(tensor=4, data=2, zero=1, accumulation=3, offload="cpu", shared=(*VALUES, "optimizer=muon")),
    Cell(
        tensor=2, pipeline=2, data=2, zero=3, schedule="zbv", accumulation=4, checkpointing="selective", shared=VALUES
    ),
    Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="1f1b", accumulation=4, precision="bf16", shared=VALUES),
    Cell(pipeline=4, data=2, zero=2, schedule="zbv", accumulation=8, precision="fp16", shared=VALUES),
    Cell(data=8, zero=1, precision="fp16", shared=VALUES),
    Cell(context=2, pipeline=2, data=2, zero=2, schedule="zbv", accumulation=4, precision="amp_o1", shared=VALUES),
    Cell(tensor=2, pipeline=2, schedule="1f1b", accumulation=3, shared=VALUES, more=("trainer.compile=true",)),
]
CELLS = [*CHOSEN, *MORE, *FP16, *COMPILED, *CONTEXT, *MORE_CONTEXT, *OFFLOADED, *CROSSED, *MODERN, *MIXED]
# Cells of every run: every value of every axis, every family of models, sequences cut, HSDP, offload and 16 bits, in
# combinations of what depends on each other. All are of eight ranks, which start once.
QUICK_CELLS = [
    Cell(data=8, replicate=4, zero=3, vocabulary="uneven"),
    Cell(tensor=8, shared=COPIED),
    Cell(tensor=4, pipeline=2, schedule="gpipe", vocabulary="uneven", precision="bf16", offload="nvme"),
    Cell(tensor=2, pipeline=2, data=2, zero=1, schedule="zbv", sequence=True, tied=False, precision="fp16",
         offload="nvme"),
    Cell(tensor=2, pipeline=2, data=2, zero=1, schedule="1f1b", sequence=True, tied=False, vocabulary="uneven",
         accumulation=3, shared=(*LLAMA, *VALUES)),
    Cell(pipeline=4, data=2, zero=3, schedule="zero_bubble", tied=False, vocabulary="uneven", accumulation=3,
         shared=WINDOWS),
    Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="zbv", sequence=True, tied=False, checkpointing="selective",
         shared=RELU2),
    Cell(tensor=2, pipeline=2, data=2, schedule="interleaved_1f1b", sequence=True, vocabulary="uneven"),
    Cell(pipeline=2, data=4, replicate=2, zero=2, schedule="1f1b", accumulation=4),
    Cell(context=4, pipeline=2, zero=3, schedule="gpipe", tied=False, checkpointing="full"),
    Cell(context=2, tensor=2, pipeline=2, zero=2, schedule="interleaved_1f1b", sequence=True, shared=QWEN),
]  # fmt: skip
QUICK = {cell.id for cell in QUICK_CELLS}
SIXTEEN_BITS = [
    next(cell for cell in (*MORE, *FP16) if cell.precision == precision and cell.pipeline > 1)
    for precision in ("bf16", "fp16", "amp_o1", "amp_o2")
]
# With these, the pairs of all axis values, and some of what is no axis. The rest meets each pair again and again.
SLOW = {cell.id for cell in [*CHOSEN[:33], *MORE[::12], *FP16[::8], *SIXTEEN_BITS, *CONTEXT[:7], *MORE_CONTEXT[::6]]}
SLOW |= {cell.id for cell in [*OFFLOADED[:5], *CROSSED[:7], *MODERN[::25], *MODERN[4::10], MIXED[0], *MIXED[1:12:4]]}
SLOW -= QUICK
