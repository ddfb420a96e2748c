"""Runs of Megatron-LM and Megatron-DeepSpeed that no constant has been fitted to.

`korthikanti_rows`: arXiv:2205.05198, tables 3 and 5, on Selene. `core_rows`: the table in Megatron-LM's README, whose
micro-batches and stages per rank are not given, so that they are guesses. `bloom_rows`: layouts that BLOOM's engineers
tried, in bigscience's chronicles (train/tr11-176B-ml/chronicles-prequel.md), 25 and 28 February 2022, on 48 nodes of
Jean Zay: 8 A100s, and four Omni-Path links of 100 Gbit/s.
"""

from __future__ import annotations

from typing import Any

from gptlite.models.gpt.config import GPTConfig
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan.workload import Workload
from plan.published.row import FULL_MFU, SAMPLES, Row

STACK, CORE, BLOOM = "Megatron-LM", "Megatron-Core", "BLOOM"
# heads, width, layers, tensor, pipeline, batch, micro-batch, stages per rank, seconds with full recomputation, and with
# sequence parallelism and selective recomputation, which repeats attention's scores; ours also repeats pointwise ops
_KORTHIKANTI = """
22B    64  6144  48 8  1   4 4 1  1.42  1.10
175B   96 12288  96 8  8  64 1 3 18.13 13.75
530B  128 20480 105 8 35 280 1 3 49.05 37.83
1T    160 25600 128 8 64 512 1 1 94.42 71.49
"""
# heads, width, layers, tensor, pipeline, GPUs, batch, micro-batch and stages per rank (guesses), TFLOP/s per GPU
_CORE = """
1.7B   16  2048  24 1  1   48  192 2 1 408.8
7.1B   32  4096  30 2  1   96  192 2 1 465.9
16B    48  6144  32 4  1  192  192 2 1 489.1
32B    56  7168  48 8  1  384  192 2 1 459.6
70B    64  8192  84 8  2  768  384 1 6 419.7
119B   80 10240  92 8  4 1536  768 1 1 420.5
177B   96 12288  96 8  6 2304 1152 1 4 432.8
314B  128 16384  96 8  8 3072 1536 1 4 474.4
462B  144 18432 112 8 16 6144 3072 1 7 459.9
"""
# layers, heads, data, tensor, pipeline, micro-batch, batch, seconds per iteration; the width is 14,336
_BLOOM = """
72  64  8 8  6 4 2048 114.11
72  64  8 8  6 4 1568 113.01
72  64  8 8  6 6 2016 123.57
72  64  4 8 12 4 1568  92.75
72  64  4 8 12 4 2048 117.07
72  64  4 8 12 2 1568  99.93
72  64  4 8 12 2 2048 128.82
72  64  6 8  8 4 2016 113.16
72  64 12 8  4 2 2016 125.52
72  64 12 8  4 4 2016 114.81
72  64 24 8  2 1 2016 145.45
72  64 24 8  2 2 2016 136.13
72  64  8 4 12 4 2048 111.89
72  64  8 4 12 2 2048 110.48
72  64 16 4  6 4 2048 117.11
72  64 16 4  6 2 2048 111.71
72  64 16 2 12 2 2048 112.50
72  64  8 2 24 1 2048 119.53
72  64  8 2 24 2 2048 122.75
72  64  4 4 24 1 2048 130.60
70  64  4 8 12 2 2048 121.63
70  64  8 4 12 2 2048 102.03
70 112  8 4 12 2 2048 104.50
70 128  8 4 12 2 2048 105.89
70  64  8 4 12 4 2048 102.27
"""
# Of our 14 transfers of a block in all passes, selective recomputation there does not repeat four, and two gathers of
# the backward pass overlap with compute (section 4.2.2).
KEPT = {"tensor_overlap": 6 / 14}
OVERLAPPED = {"tensor_overlap": 0.8}  # --tp-comm-overlap, in both passes
JEAN_ZAY = {"inter.gb_per_second": 12.5, "inter.shared": 2}


def korthikanti_rows() -> list[Row]:
    """Megatron-LM of 2022 with full recomputation, and with sequence parallelism and selective recomputation."""
    lines = [line.split() for line in _KORTHIKANTI.strip().splitlines()]
    return [_korthikanti(selective, *words) for selective in (False, True) for words in lines]


def core_rows() -> list[Row]:
    """Megatron-Core on H100s."""
    return [_core(*line.split()) for line in _CORE.strip().splitlines()]


def bloom_rows() -> list[Row]:
    """Layouts tried for BLOOM."""
    return [_bloom(line) for line in _BLOOM.strip().splitlines()]


def _korthikanti(selective: bool, size: str, *words: str) -> Row:
    heads, width, layers, tensor, pipeline, batch, micro, virtual = map(int, words[:8])
    shape, mode = (layers, heads, width, 51200, 2048), ActivationCheckpointing
    more = {"activation_checkpointing": mode.selective if selective else mode.full, "sequence": selective}
    work = _work(shape, tensor * pipeline, batch, micro, tensor, pipeline, virtual, **more)
    name, speed = f"Megatron-LM {size}{', selective' * selective}", batch / float(words[8 + selective])
    return Row(name, "dgx-a100", work, speed, SAMPLES, hides=False, keys=KEPT if selective else {}, stack=STACK)


def _core(size: str, *words: str) -> Row:
    heads, width, layers, tensor, pipeline, world, batch, micro, virtual = map(int, words[:9])
    shape = layers, heads, width, 131072, 4096
    more: dict[str, Any] = {"zero": 1, "sequence": tensor > 1, "activation_checkpointing": ActivationCheckpointing.none}
    work = _work(shape, world, batch, micro, tensor, pipeline, virtual, "bf16", Attention.sdpa, **more)
    return Row(
        f"Megatron-Core {size}", "dgx-h100", work, float(words[9]) / 9.894, FULL_MFU, keys=OVERLAPPED, stack=CORE
    )


def _bloom(line: str) -> Row:
    *words, seconds = line.split()
    layers, heads, data, tensor, pipeline, micro, batch = map(int, words)
    shape = layers, heads, 14336, 250680, 2048
    # The rows of 28 February summed gradients in fp32.
    work = _work(shape, 384, batch, micro, tensor, pipeline, half_sums=layers == 72, zero=1)
    name = f"BLOOM {layers} layers, {heads} heads, {tensor} x {pipeline} x {data}, batch {micro} of {batch}"
    return Row(name, "a100-80gb", work, batch / float(seconds), SAMPLES, hides=False, keys=JEAN_ZAY, stack=BLOOM)


def _work(
    shape: tuple[int, int, int, int, int],
    world: int,
    batch: int,
    micro: int,
    tensor: int,
    pipeline: int,
    virtual: int = 1,
    dtype: str = "fp16",
    attention: Attention = Attention.fused_softmax,
    half_sums: bool = True,
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.full,
    **layout: Any,
) -> Workload:
    layers, heads, width, vocab, length = shape
    model = GPTConfig(num_layers=layers, num_heads=heads, d_model=width, vocab_size=vocab, sequence_length=length)
    model.vocab_multiple = 128 * tensor
    model.dropout = 0.1 if dtype == "fp16" else 0.0
    config = ParallelismConfig(
        tensor=tensor,
        pipeline=pipeline,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        activation_checkpointing=activation_checkpointing,
        **layout,
    )
    return Workload(
        model=model,
        parallelism=config,
        layout=resolve(config, world),
        optimizer=AdamWConfig(),
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_length=length,
        dtype=dtype,
        attention=attention,
        half_sums=half_sums and dtype == "fp16",
    )
