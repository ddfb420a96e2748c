"""FLOPs of a training step, for MFU and for the balance of pipeline stages."""

from gptlite.models.gpt.config import GPTConfig


def matmul_parameters(config: GPTConfig) -> int:
    """Return the number of weights that multiply every token: the blocks' four matrices and the head, without
    embeddings, norms and biases."""
    per_layer = 4 * config.d_model**2 + 2 * config.d_model * config.ffn_size
    return config.num_layers * per_layer + config.d_model * (config.vocab_size or config.padded_vocab_size)


def flops_per_token(config: GPTConfig, sequence_length: int) -> int:
    """Return the FLOPs of forward and backward per token: 6 per matmul weight, and 6·L·d·S of causal attention.

    A weight costs a multiply and an add in the forward pass, twice that in the backward. Attention does the same with
    two S×S matmuls per layer, half of them masked (PaLM's 12·L·d·S, arXiv:2204.02311 appendix B, halved). Recomputation
    is not counted: MFU is based on the model's FLOPs, not the hardware's.
    """
    return config.num_layers * layer_flops(config, sequence_length) + head_flops(config)


def layer_flops(config: GPTConfig, sequence_length: int | None = None) -> int:
    """Return a block's share of `flops_per_token`; by default at the longest sequence."""
    matrices = 4 * config.d_model**2 + 2 * config.d_model * config.ffn_size
    return 6 * matrices + 6 * config.d_model * (sequence_length or config.sequence_length)


def head_flops(config: GPTConfig) -> int:
    """Return the output head's share of `flops_per_token`."""
    return 6 * config.d_model * (config.vocab_size or config.padded_vocab_size)


def num_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of the whole model, including the embedding's padding rows. `vocab_size` must be
    set."""
    width, inner, rows = config.d_model, config.ffn_size, config.padded_vocab_size
    norm = width * (2 if config.bias else 1)
    matrices = 4 * width**2 + 2 * width * inner
    biases = 5 * width + inner if config.bias else 0  # of queries, keys, values, the projection, up and down
    embeddings = rows * width * (1 if config.tied_embeddings else 2) + config.sequence_length * width
    return embeddings + config.num_layers * (matrices + biases + 2 * norm) + norm
