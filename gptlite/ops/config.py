"""Which implementation of each op runs."""

from dataclasses import dataclass
from enum import Enum

QUERY_BLOCK = 256  # queries whose scores matmul attention writes out at once: bounds memory, skips the upper triangle
# The most logits held at once. The kernel's CPU chunk stays in a cache of some 100 MB between matrix products; on a GPU
# 32,768 tokens of GPT-2's vocabulary are one chunk (3.3 GB in 16 bits).
# A step on the meta device is traced for a GPU.
LOGIT_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30, "meta": 4 * 2**30}
# fp32 logits at a time: a CPU's fit its cache.
SOFTMAX_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20, "meta": 256 * 2**20}
CHUNK_ROWS = 128  # a chunk's rows are a multiple of it where products are aligned: the tile of a GPU's


@dataclass(frozen=True)
class Products:
    """How matrix products are given to a kind of device.

    `multiple`: every operand's sides and strides are multiples of so many elements. cuBLAS copies by TMA only what is
    aligned to 16 bytes, and falls back to slower kernels for the rest. 1: as they come.
    `fp32`: a product of 16-bit operands can be written, or added to what is there, in fp32.
    """

    multiple: int = 1
    fp32: bool = False

    @property
    def aligned(self) -> bool:
        """Whether operands are padded."""
        return self.multiple > 1

    def up(self, size: int) -> int:
        """The next multiple."""
        return -(-size // self.multiple) * self.multiple


ON_GPU = Products(8, fp32=True)
PRODUCTS = {"cpu": Products(), "cuda": ON_GPU, "meta": ON_GPU}


def logit_rows(device: str, tokens: int, columns: int, itemsize: int) -> int:
    """Tokens whose logits, of so many `columns`, exist at a time: of every chunk but the last.

    Where products are aligned chunks are of about equal size, so that none is a small product; rounding up may exceed
    the limit by CHUNK_ROWS.
    """
    most = LOGIT_BYTES[device]
    if not PRODUCTS[device].aligned:
        return max(1, most // (columns * itemsize))
    chunks = max(1, -(-tokens * columns * itemsize // most))
    return max(1, -(-tokens // (chunks * CHUNK_ROWS))) * CHUNK_ROWS


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
    linear: Implementation = Implementation.auto  # its weight's gradient: on GPUs, in bf16 on CPUs with AVX512-BF16
    cross_entropy: CrossEntropy = CrossEntropy.auto
    adamw: Implementation = Implementation.auto  # and Adam; the gradient norm, too
