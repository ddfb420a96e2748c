"""Training speeds that others have published, with the settings they were reached at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptlite.models.gpt.config import GPTConfig
from gptlite.parallelism.layout import Layout

MEGATRON, DEEPSPEED = "megatron", "deepspeed"


@dataclass(frozen=True)
class Row:
    """One published run. `measured` is TFLOP/s a GPU as Megatron's paper counts them, or samples a second.

    `torch_ddp`: gradients are reduced during the last backward pass. `counted`: whether the error bars are of it.
    """

    table: str
    name: str
    model: GPTConfig
    layout: Layout
    global_batch: int
    micro_batch: int
    measured: float
    virtual: int = 1
    zero: int = 0
    torch_ddp: bool = False
    counted: bool = True

    @property
    def flops(self) -> float:
        """FLOPs of a step with recomputation: 96 B s l h² (1 + s/6h + V/16lh) (arXiv:2104.04473, section 5.1)."""
        its = self.model
        length, width, layers, vocab = its.sequence_length, its.d_model, its.num_layers, its.padded_vocab_size
        inside = 1 + length / (6 * width) + vocab / (16 * layers * width)
        return 96 * self.global_batch * length * layers * width**2 * inside

    @property
    def seconds(self) -> float:
        """The measured step."""
        if self.table == MEGATRON:
            return self.flops / (self.measured * 1e12 * self.layout.world_size)
        return self.global_batch / self.measured

    def in_its_unit(self, seconds: float) -> float:
        """A step of so many seconds as the table would print it."""
        return self.measured * self.seconds / seconds


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
# micro-batch is a data-parallel rank's part of the batch. Megatron's 8B at 4 GPUs a copy cannot fit 32 GB: not counted.
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
    return [_megatron(line.split()) for line in _MEGATRON.strip().splitlines()]


def deepspeed_rows() -> list[Row]:
    """DeepSpeed's tutorial on V100s: Megatron-LM alone, then with ZeRO."""
    return [_deepspeed(line.split()) for line in _DEEPSPEED.strip().splitlines()]


def _megatron(words: Sequence[str]) -> Row:
    heads, width, layers, tensor, pipeline, gpus, batch, micro, virtual = map(int, words[1:10])
    model = GPTConfig(num_layers=layers, num_heads=heads, d_model=width, vocab_size=51200, sequence_length=2048)
    layout = Layout((pipeline, gpus // (pipeline * tensor), 1, tensor))
    return Row(
        table=MEGATRON,
        name=f"{words[0]}B",
        model=model,
        layout=layout,
        global_batch=batch,
        micro_batch=micro,
        measured=float(words[11]),
        virtual=virtual,
        torch_ddp=words[10] == "yes",
    )


def _deepspeed(words: Sequence[str]) -> Row:
    layers, width, heads, tensor, zero, batch = map(int, words[1:7])
    model = GPTConfig(
        num_layers=layers,
        num_heads=heads,
        d_model=width,
        vocab_size=50257,
        vocab_multiple=128 * tensor,
        sequence_length=1024,
    )
    data = 64 // tensor
    layout = Layout((1, 1, data, tensor) if zero else (1, data, 1, tensor))
    return Row(
        table=DEEPSPEED,
        name=f"{words[0]}B {'ZeRO' if zero else 'Megatron'} mp{tensor}",
        model=model,
        layout=layout,
        global_batch=batch,
        micro_batch=batch // data,
        measured=float(words[7]),
        zero=zero,
        counted=not (words[0] == "8" and not zero),
    )
