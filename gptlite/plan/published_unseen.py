"""Published runs of other stacks, priced as ours would run them with constants that have not seen them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import flops_per_token
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.plan.cost import predict
from gptlite.plan.published import preset
from gptlite.plan.workload import Workload

TOKENS, MFU = "tokens/s a GPU", "% MFU"


@dataclass(frozen=True)
class Run:
    """One run: `published` in `unit`. `full`: its MFU counts attention's masked half too. `doubt`: what is a guess."""

    name: str
    cluster: str
    world: int
    model: GPTConfig
    global_batch: int
    micro_batch: int
    published: float
    unit: str
    doubt: str
    full: bool = False
    layout: dict[str, Any] = field(default_factory=dict)


def unseen_error(run: Run) -> tuple[float, float]:
    """The prediction in the run's unit, and predicted over published less one."""
    its, cluster = run.model, preset(run.cluster)
    config = ParallelismConfig(**run.layout)
    layout = resolve(config, run.world)
    length = its.sequence_length
    work = Workload(
        model=its,
        parallelism=config,
        layout=layout,
        optimizer=AdamWConfig(),
        global_batch_size=run.global_batch,
        micro_batch_size=run.micro_batch,
        sequence_length=length,
        dtype="bf16",
        attention=Attention.sdpa,
    )
    each = predict(work, cluster).tokens_per_second / run.world
    predicted = each
    if run.unit == MFU:
        causal = flops_per_token(its, length)
        counted = causal + (6 * its.num_layers * its.d_model * length if run.full else 0)
        predicted = 100 * each * counted / (cluster.peak_tflops["bf16"] * 1e12)
    return predicted, predicted / run.published - 1


def _gpt(layers: int, heads: int, width: int, length: int, vocab: int = 50257, inner: int | None = None) -> GPTConfig:
    return GPTConfig(
        num_layers=layers, num_heads=heads, d_model=width, d_ff=inner, vocab_size=vocab, sequence_length=length
    )


_GPT2, _XL, _175B = _gpt(12, 12, 768, 1024), _gpt(48, 25, 1600, 1024), _gpt(96, 96, 12288, 4096, 131072)
_SELECTIVE = ActivationCheckpointing.selective
_3D = {"tensor": 4, "pipeline": 8, "schedule": "interleaved_1f1b", "virtual_stages": 6, "sequence": True, "zero": 1}
_FUSED = "its kernels are fused or compiled, ours are priced op by op"

UNSEEN = (
    Run(
        "nanoGPT 124M",
        "a100-40gb",
        8,
        _GPT2,
        480,
        12,
        107e3,
        TOKENS,
        "its four days for 600,000 steps; with which attention it does not say, ours is in one kernel",
    ),
    Run("FlashAttention's GPT3 125M", "a100-80gb", 8, _gpt(12, 12, 768, 2048), 256, 16, 164e3, TOKENS, _FUSED),
    Run("FlashAttention's GPT3 1.3B", "a100-80gb", 8, _gpt(24, 16, 2048, 2048), 256, 4, 61.4, MFU, _FUSED, full=True),
    Run("llm.c GPT-2 124M", "dgx-h100", 1, _GPT2, 512, 64, 468e3, TOKENS, _FUSED),
    Run("llm.c GPT-2 1558M", "dgx-h100", 8, _XL, 1024, 16, 46.4, MFU, _FUSED, layout={"zero": 1}),
    Run(
        "torchtitan Llama-3.1-8B",
        "dgx-h100",
        8,
        _gpt(32, 32, 4096, 8192, 128256, inner=21504),
        8,
        1,
        33.0,
        MFU,
        "SwiGLU as a wider MLP, no grouped queries; published 33 to 39",
        full=True,
        layout={"zero": 3, "activation_checkpointing": _SELECTIVE},
    ),
    Run(
        "Megatron-LM 175B, 96 GPUs",
        "dgx-h100",
        96,
        _175B,
        1152,
        1,
        47.0,
        MFU,
        "layout guessed: tp 4, pp 8, 6 virtual stages; it overlaps tp with products",
        full=True,
        layout=_3D,
    ),
    Run(
        "Megatron-LM 175B, 4,608 GPUs",
        "dgx-h100",
        4608,
        _175B,
        1152,
        1,
        42.0,
        MFU,
        "layout guessed, as above",
        full=True,
        layout=_3D,
    ),
)
