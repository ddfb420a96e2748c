"""Which implementation of each op runs."""

from dataclasses import dataclass
from enum import Enum

QUERY_BLOCK = 256  # queries whose scores matmul attention writes out at once: bounds memory, skips the upper triangle
# The most logits held at once. The kernel's CPU chunk stays in a cache of some 100 MB between matrix products.
LOGIT_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
SOFTMAX_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # fp32 logits at a time: a CPU's fit its cache


class Implementation(Enum):
    """`auto` takes the fused kernel where it runs here; asking for one that cannot run is an error."""

    auto = "auto"
    fused = "fused"
    reference = "reference"


class LayerNorm(Enum):
    """`apex` is NVIDIA Apex's kernel, the others as Implementation's."""

    auto = "auto"
    fused = "fused"
    reference = "reference"
    apex = "apex"


class CrossEntropy(Enum):
    """`reference` writes all logits out in fp32; `chunked` is plain torch, a chunk of rows at a time and in place."""

    auto = "auto"
    fused = "fused"
    chunked = "chunked"
    reference = "reference"


class Attention(Enum):
    """`auto` picks by device. `fused` is ours for CPUs, the others are:

    `sdpa`: torch's, which picks a kernel; `cudnn` and `fa3` (FlashAttention 3): that kernel of torch's, on GPUs;
    `fused_softmax` and `matmul`: the scores written out, for any mask and dropout, by our softmax kernel or by torch.
    """

    auto = "auto"
    fused = "fused"
    sdpa = "sdpa"
    cudnn = "cudnn"
    fa3 = "fa3"
    fused_softmax = "fused_softmax"
    matmul = "matmul"


@dataclass
class OpsConfig:
    """`implementation` is what the keys below it mean by `auto`."""

    implementation: Implementation = Implementation.auto
    attention: Attention = Attention.auto
    layer_norm: LayerNorm = LayerNorm.auto  # that with the residual before it, too
    bias_gelu: Implementation = Implementation.auto
    dropout: Implementation = Implementation.auto
    linear: Implementation = Implementation.auto  # its weight's gradient, in bf16 on CPUs with AVX512-BF16
    cross_entropy: CrossEntropy = CrossEntropy.auto
    adamw: Implementation = Implementation.auto  # and Adam; the gradient norm, too
