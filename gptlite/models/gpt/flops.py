"""FLOPs of a training step, for MFU and for the balance of pipeline stages."""

from gptlite.models.gpt.config import GPTConfig, Norm, Position


def matmul_parameters(config: GPTConfig) -> int:
    """Return the number of weights that multiply a token: the blocks' matrices, of experts those of the chosen ones,
    and the head, without embeddings, norms and biases."""
    return _matrices(config) + config.d_model * (config.vocab_size or config.padded_vocab_size)


def flops_per_token(config: GPTConfig, sequence_length: int) -> int:
    """Return the FLOPs of forward and backward per token: 6 per matmul weight, and 6·L·d·S of causal attention, where d
    is the width of all queries. A window of w positions replaces S by 2w - w²/S.

    A weight costs a multiply and an add in the forward pass, twice that in the backward. Attention does the same with
    two S×S matmuls per layer, half of them masked (PaLM's 12·L·d·S, arXiv:2204.02311 appendix B, halved). Recomputation
    is not counted: MFU is based on the model's FLOPs, not the hardware's.
    """
    return config.num_layers * layer_flops(config, sequence_length) + head_flops(config)


def layer_flops(config: GPTConfig, sequence_length: int | None = None) -> int:
    """Return a block's mean share of `flops_per_token`; by default at the longest sequence."""
    length = sequence_length or config.sequence_length
    seen = [min(config.window(layer) or length, length) for layer in range(config.num_layers)]
    keys = sum(2 * each - each * each / length for each in seen) / config.num_layers
    return round(6 * _matrices(config) / config.num_layers + 6 * config.query_size * keys)


def _matrices(config: GPTConfig, *, all_experts: bool = False) -> int:
    """Return the number of weights in the blocks' matrices, by default without the experts that a token does not
    take."""
    moe, dense = config.moe, config.num_layers - config.moe_layers
    hidden = dense * (config.up_size + config.ffn_size)
    expert = config.up_width(config.expert_size) + config.expert_size
    hidden += config.moe_layers * (moe.experts + (moe.shared + moe.top_k) * expert)
    idle = idle_parameters(config) if all_experts else 0
    return config.d_model * (config.num_layers * (config.qkv_size + config.query_size) + hidden) + idle


def idle_parameters(config: GPTConfig) -> int:
    """Return the number of weights of experts that a token does not take."""
    idle = config.moe_layers * (config.moe.experts - config.moe.top_k)
    return max(0, idle) * config.d_model * (config.up_width(config.expert_size) + config.expert_size)


def head_flops(config: GPTConfig) -> int:
    """Return the output head's share of `flops_per_token`."""
    return 6 * config.d_model * (config.vocab_size or config.padded_vocab_size)


def num_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of the whole model, including the embedding's padding rows. `vocab_size` must be
    set."""
    width, rows = config.d_model, config.padded_vocab_size
    norm = width * (config.norm_gain + (config.bias and config.norm is Norm.layer_norm))
    heads = 2 * config.head_width if config.qk_norm_heads else config.query_size + config.kv_size
    heads = heads if config.qk_norm and config.norm_gain else 0
    mlp_biases = (config.num_layers - config.moe_layers) * (config.up_size + width)
    biases = config.num_layers * (config.qkv_size + width) + mlp_biases if config.bias else 0
    embeddings = rows * width * (1 if config.tied_embeddings else 2)
    positions = config.sequence_length * width if config.position is Position.learned else 0
    for layer in range(config.num_layers):
        embeds, residual = config.has_value_embedding(layer), config.has_value_residual(layer)
        embeddings += rows * config.kv_size * embeds + (1 + embeds + residual) * (embeds or residual)
    matrices = _matrices(config, all_experts=True)
    return embeddings + positions + matrices + biases + config.num_layers * (2 * norm + heads) + norm
