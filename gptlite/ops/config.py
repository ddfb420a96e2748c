"""Choice of the implementation of each op."""

from dataclasses import dataclass
from enum import Enum

QUERY_BLOCK = 256  # queries per block of matmul attention: bounds memory, and skips most of the upper triangle
# Maximum number of bytes of logits in memory at a time. On a GPU, 32,768 tokens with GPT-2's vocabulary are one chunk
# (3.3 GB in 16-bit precision). The meta device has the values of a GPU, since steps are traced on it.
LOGIT_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30, "meta": 4 * 2**30}
# Maximum number of bytes of fp32 logits in a block of the softmax. On a CPU, a block fits in the cache.
SOFTMAX_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20, "meta": 256 * 2**20}
CHUNK_ROWS = 128  # with aligned GEMMs, a chunk's number of rows is a multiple of this, the tile size of GPU GEMMs


@dataclass(frozen=True)
class Products:
    """Alignment, output dtype and operands of GEMMs on a device type.

    `multiple`: dimensions and strides of every operand are multiples of this number of elements; 1 means no alignment.
    cuBLAS uses TMA only for data aligned to 16 bytes, and falls back to slower kernels otherwise. `fp32`: a GEMM of
    16-bit operands can write or accumulate its result in fp32. `compiled`: operands are quantized to fp8 by a compiled
    kernel, without temporaries.
    """

    multiple: int = 1
    fp32: bool = False
    compiled: bool = False

    @property
    def aligned(self) -> bool:
        """True if operands are padded."""
        return self.multiple > 1

    def up(self, size: int) -> int:
        """Return `size` rounded up to a multiple."""
        return -(-size // self.multiple) * self.multiple


ON_GPU = Products(8, fp32=True, compiled=True)
PRODUCTS = {"cpu": Products(), "cuda": ON_GPU, "meta": ON_GPU}
FP8_PRODUCTS = Products(16)  # on every device
# Cross entropy's gradient in e5m2 has this value for 1, the largest that softmax gives. A power of two rounds like no
# scale at all. e5m2's largest value is 1.75 times as large, for z-loss; probabilities below 2^-32 become 0.
E5M2_ONE = 2.0**15


def logit_rows(device: str, tokens: int, columns: int, itemsize: int) -> int:
    """Return the number of tokens per chunk of logits with this many `columns`. The last chunk may have fewer.

    With aligned GEMMs, chunks have about equal size, so that no GEMM is small. Rounding up may exceed LOGIT_BYTES
    by up to CHUNK_ROWS rows.
    """
    most = LOGIT_BYTES[device]
    if not PRODUCTS[device].aligned:
        return max(1, most // (columns * itemsize))
    chunks = max(1, -(-tokens * columns * itemsize // most))
    return max(1, -(-tokens // (chunks * CHUNK_ROWS))) * CHUNK_ROWS


class Implementation(Enum):
    """Implementation of an op. `auto` uses the fused kernel if it can run; `fused` raises if it cannot."""

    auto = "auto"
    fused = "fused"
    reference = "reference"


class LayerNormKernel(Enum):
    """Implementation of layer norm. `apex` is NVIDIA Apex's kernel; the others are as in Implementation."""

    auto = "auto"
    fused = "fused"
    reference = "reference"
    apex = "apex"


class CrossEntropy(Enum):
    """Implementation of the loss. `reference` computes all logits in fp32; `chunked` is plain torch, chunk by chunk."""

    auto = "auto"
    fused = "fused"
    chunked = "chunked"
    reference = "reference"


class Attention(Enum):
    """Implementation of attention. `auto` chooses by device. `fused` is our CPU kernel.

    `sdpa`: torch's SDPA, which selects a kernel. `cudnn` and `fa3` (FlashAttention 3): SDPA with only that kernel, on
    GPUs. `fused_softmax` and `matmul`: materialized scores, which support any mask and dropout, with our softmax kernel
    or in plain torch.
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
    """Implementation of each op. `implementation` applies to the keys that are `auto`."""

    implementation: Implementation = Implementation.auto
    attention: Attention = Attention.auto
    layer_norm: LayerNormKernel = LayerNormKernel.auto  # layer norm and RMS norm, alone or after a residual addition
    activation: Implementation = Implementation.auto  # bias and activation of the MLP
    rope: Implementation = Implementation.auto  # rotary position embeddings, and norms of queries and keys
    dropout: Implementation = Implementation.auto
    linear: Implementation = Implementation.auto  # weight gradients; fused on GPUs, and for bf16 with AVX512-BF16
    cross_entropy: CrossEntropy = CrossEntropy.auto
    adamw: Implementation = Implementation.auto  # AdamW, Adam and the gradient norm
