"""FLOPs of a training step, for MFU and for balancing pipeline stages."""

from gptlite.models.gpt.config import GPTConfig


def flops_per_token(config: GPTConfig, sequence_length: int) -> int:
    """Return the FLOPs per token of a forward and backward pass: 6 per matmul weight, and 6·L·d·S for causal attention
    in L layers, where d is the total width of the query heads. A window of w positions replaces S by 2w - w²/S.

    A weight costs a multiply and an add in the forward pass, and twice that in the backward pass. Attention has two S×S
    matmuls per layer, half of which is masked; this gives half of PaLM's 12·L·d·S (arXiv:2204.02311, appendix B).
    Recomputation is not counted, since MFU is based on the model's FLOPs, not the hardware's.
    """
    return config.num_layers * layer_flops(config, sequence_length) + head_flops(config)


def layer_flops(config: GPTConfig, sequence_length: int | None = None) -> int:
    """Return the FLOPs per token of one block, averaged over the blocks. The default `sequence_length` is the
    model's maximum."""
    length = sequence_length or config.sequence_length
    seen = [min(config.window(layer) or length, length) for layer in range(config.num_layers)]
    keys = sum(2 * each - each * each / length for each in seen) / config.num_layers
    return round(6 * _matrices(config) / config.num_layers + 6 * config.query_size * keys)


def _matrices(config: GPTConfig) -> int:
    """Return the number of weights in the blocks' matrices, without the experts that a token is not routed to."""
    moe, dense = config.moe, config.num_layers - config.moe_layers
    hidden = dense * (config.up_size + config.ffn_size)
    expert = config.up_width(config.expert_size) + config.expert_size
    hidden += config.moe_layers * (moe.experts + (moe.shared + moe.top_k) * expert)
    return config.d_model * (config.num_layers * (config.qkv_size + config.query_size) + hidden)


def idle_parameters(config: GPTConfig) -> int:
    """Return the number of weights in the experts that a token is not routed to, over all layers."""
    idle = config.moe_layers * (config.moe.experts - config.moe.top_k)
    return max(0, idle) * config.d_model * (config.up_width(config.expert_size) + config.expert_size)


def head_flops(config: GPTConfig) -> int:
    """Return the FLOPs per token of the output head."""
    return 6 * config.d_model * (config.vocab_size or config.padded_vocab_size)
