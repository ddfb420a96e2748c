"""Published runs of other code bases, which no constant has been fitted to."""

from __future__ import annotations

from typing import Any

from gptlite.models.gpt.config import GPTConfig
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan.workload import Workload
from plan.published.row import FULL_MFU, MFU, TOKENS, Row

_FUSED = "its fused or compiled kernels are not modelled"
_3D: dict[str, Any] = {
    "tensor": 4,
    "pipeline": 8,
    "schedule": "interleaved_1f1b",
    "virtual_stages": 6,
    "sequence": True,
    "zero": 1,
}


def unseen_rows() -> list[Row]:
    """Their settings, as far as their authors say."""
    gpt2, xl, large = _gpt(12, 12, 768, 1024), _gpt(48, 25, 1600, 1024), _gpt(96, 96, 12288, 4096, 131072)
    small, wide = _gpt(12, 12, 768, 2048), _gpt(24, 16, 2048, 2048)
    llama = _gpt(32, 32, 4096, 8192, 128256, inner=21504)
    zero3 = {"zero": 3, "activation_checkpointing": ActivationCheckpointing.selective}
    four_days = "computed from four days for 600,000 steps; attention, which is not stated, modelled as one kernel"
    as_mlp = "SwiGLU modelled as a wider MLP, grouped-query as multi-head attention; published: 33 to 39%"
    guess = "assumed: tensor 4, pipeline 8, 6 stages per rank"
    return [
        Row("nanoGPT 124M", "a100-40gb", _work(gpt2, 8, 480, 12), 107e3, TOKENS, four_days, counted=False),
        Row("FlashAttention's GPT3 125M", "a100-80gb", _work(small, 8, 256, 16), 164e3, TOKENS, _FUSED),
        Row("FlashAttention's GPT3 1.3B", "a100-80gb", _work(wide, 8, 256, 4), 61.4, FULL_MFU, _FUSED),
        Row("llm.c GPT-2 124M", "dgx-h100", _work(gpt2, 1, 512, 64), 468e3, TOKENS, _FUSED),
        Row("llm.c GPT-2 1558M", "dgx-h100", _work(xl, 8, 1024, 16, zero=1), 46.4, MFU, _FUSED),
        Row(
            "torchtitan Llama-3.1-8B", "dgx-h100", _work(llama, 8, 8, 1, **zero3), 33.0, FULL_MFU, as_mlp, counted=False
        ),
        Row("Megatron-LM 175B, 96 GPUs", "dgx-h100", _work(large, 96, 1152, 1, **_3D), 47.0, FULL_MFU, guess),
        Row("Megatron-LM 175B, 4,608 GPUs", "dgx-h100", _work(large, 4608, 1152, 1, **_3D), 42.0, FULL_MFU, guess),
    ]


def _gpt(layers: int, heads: int, width: int, length: int, vocab: int = 50257, inner: int | None = None) -> GPTConfig:
    return GPTConfig(
        num_layers=layers, num_heads=heads, d_model=width, d_ff=inner, vocab_size=vocab, sequence_length=length
    )


def _work(model: GPTConfig, world: int, batch: int, micro: int, **layout: Any) -> Workload:
    config = ParallelismConfig(**layout)
    return Workload(
        model=model,
        parallelism=config,
        layout=resolve(config, world),
        optimizer=AdamWConfig(),
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_length=model.sequence_length,
        dtype="bf16",
        attention=Attention.sdpa,
    )
