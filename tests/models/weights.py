"""Counts of a GPT's weights that only tests need."""

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import _matrices, head_flops


def matmul_parameters(config: GPTConfig) -> int:
    """The weights in a token's matrix products: those of the head and of the blocks' matrices, of experts only the
    chosen and the shared ones. Embeddings, norms and biases do not count."""
    return _matrices(config) + head_flops(config) // 6
