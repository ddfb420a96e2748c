"""Two tables of published speeds: Megatron-LM's weak scaling on A100s, and DeepSpeed's tutorial on V100s."""

from __future__ import annotations

from gptlite.models.gpt.config import GPTConfig
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan.workload import Workload
from plan.published.row import SAMPLES, TFLOPS, Row

# Narayanan et al. 2021 (arXiv:2104.04473), table 1, A100-80GB. Micro-batches, virtual stages and whose data-parallel
# wrapper (torch's overlaps) are of Megatron-LM's examples/sc21/run_table_1.sh.
# params B, heads, hidden, layers, tensor, pipeline, GPUs, batch, micro-batch, virtual, torch's, TFLOP/s a GPU
_MEGATRON = """
1.7    24   2304   24  1   1    32   512  16  1  yes  137
3.6    32   3072   30  2   1    64   512  16  1  yes  138
7.5    32   4096   36  4   1   128   512  16  1  yes  142
18.4   48   6144   40  8   1   256  1024   8  1  yes  135
39.1   64   8192   48  8   2   512  1536   4  1  no   138
76.1   80  10240   60  8   4  1024  1792   2  3  no   140
145.6  96  12288   80  8   8  1536  2304   2  2  no   148
310.1 128  16384   96  8  16  1920  2160   1  2  no   155
529.6 128  20480  105  8  35  2520  2520   1  3  no   163
1008  160  25600  128  8  64  3072  3072   1  1  no   163
"""

# DeepSpeed's Megatron-LM tutorial (deepspeed.ai/tutorials/megatron), 64 V100-32GB in four DGX-2, February 2020. One
# micro-batch is a data-parallel rank's part of the batch. Megatron's 8B at 4 GPUs a copy cannot fit 32 GB (35 GiB by
# Korthikanti et al.'s count, arXiv:2205.05198): not counted.
# params B, layers, hidden, heads, tensor, ZeRO stage, batch, samples/s
_DEEPSPEED = """
1.5   48  1600  16   2  0   512  128.56
4     64  2304  16   4  0   128   49.36
8     72  3072  24   4  0   128   24.57
20   111  3808  32  16  0    16    3.42
1.5   48  1600  16   1  1  2048  151.35
4     64  2304  16   1  1   512   75.13
8     72  3072  24   2  1   512   43.52
20   111  3808  32   4  1   128   12.65
"""


def megatron_rows() -> list[Row]:
    """Megatron-LM's weak scaling on A100s."""
    return [_megatron(*line.split()) for line in _MEGATRON.strip().splitlines()]


def deepspeed_rows() -> list[Row]:
    """DeepSpeed's tutorial on V100s: Megatron-LM alone, then with ZeRO."""
    return [_deepspeed(*line.split()) for line in _DEEPSPEED.strip().splitlines()]


def _megatron(name: str, *words: str) -> Row:
    heads, width, layers, tensor, pipeline, world, batch, micro, virtual = map(int, words[:9])
    model = GPTConfig(
        num_layers=layers, num_heads=heads, d_model=width, vocab_size=51200, sequence_length=2048, dropout=0.1
    )
    config = ParallelismConfig(
        tensor=tensor,
        pipeline=pipeline,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
    )
    work = _work(model, config, world, batch, micro)
    # What overlaps is data parallelism alone: beside tensor parallelism, whose sums are waited for, it is the less.
    hides = words[9] == "yes" and tensor == 1
    return Row(f"{name}B", "dgx-a100", work, float(words[10]), TFLOPS, hides=hides)


def _deepspeed(name: str, *words: str) -> Row:
    layers, width, heads, tensor, zero, batch = map(int, words[:6])
    model = GPTConfig(
        num_layers=layers,
        num_heads=heads,
        d_model=width,
        vocab_size=50257,
        vocab_multiple=128 * tensor,
        sequence_length=1024,
        dropout=0.1,
    )
    work = _work(model, ParallelismConfig(tensor=tensor, zero=zero), 64, batch, batch * tensor // 64)
    name, doubtful = f"{name}B {'ZeRO' if zero else 'Megatron'} mp{tensor}", name == "8" and not zero
    return Row(name, "dgx-2-v100", work, float(words[6]), SAMPLES, hides=False, counted=not doubtful)


def _work(model: GPTConfig, config: ParallelismConfig, world: int, batch: int, micro: int) -> Workload:
    """Megatron-LM's step: fp16, gradients summed in it, everything recomputed, the scores written out and uncut."""
    config.activation_checkpointing = ActivationCheckpointing.full
    return Workload(
        model=model,
        parallelism=config,
        layout=resolve(config, world),
        optimizer=AdamWConfig(),
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_length=model.sequence_length,
        dtype="fp16",
        attention=Attention.fused_softmax,
        half_sums=True,
    )
