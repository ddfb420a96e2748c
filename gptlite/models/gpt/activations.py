"""Estimate of activation memory, for the banner."""

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.micro_batch import MicroBatch
from gptlite.ops.config import QUERY_BLOCK, Attention, logit_rows

# Attention implementations that materialize their scores.
WRITTEN_OUT = (Attention.matmul, Attention.fused_softmax)


def block_bytes(config: GPTConfig, batch: MicroBatch, recompute: str = "none") -> int:
    """Return the bytes that autograd keeps of one block for the backward pass.

    Korthikanti et al. (2022, arXiv:2205.05198) count s b h (10 + 24/t + 5 a s / (h t)) bytes in 16 bits, for b
    sequences of s positions, width h, a heads and t tensor-parallel ranks; with sequence parallelism the 10 is divided
    by t too. This model has the 24 (queries, keys, values, input of attention's projection, input and output of the
    GELU) and 8 of the 10 (inputs of norms and matrices). The other 2, dropout's masks, and attention's 5
    (probabilities, their mask, and their product) exist only with dropout. Without dropout, probabilities are kept only
    by matmul attention of one block of queries. `recompute`: "full" keeps a block's input, "selective" also the outputs
    of its matrices.
    """
    width, ranks = config.d_model, batch.tensor
    normed = config.qkv_size if config.qk_norm else 0  # the norms of heads keep their input; rotation alone keeps none
    # Of layers that mix values, another copy and the embedding's rows.
    mixed = round(config.mixed_layers / config.num_layers * (config.qkv_size + config.kv_size))
    inner, rows = _inner(config, 1), _rows(config, batch.itemsize)
    between = ranks if batch.sequence else 1
    if recompute == "full":
        return batch.tokens * width * batch.itemsize // between
    if recompute == "selective":
        elements = width / between + (config.qkv_size + _inner(config, 0)) / ranks + rows + 2 * width
        if batch.attention not in WRITTEN_OUT and not config.dropout:
            elements += config.query_size / ranks
        return round(batch.tokens * elements * batch.itemsize)
    elements = 4 * width / between + rows + (config.qkv_size + normed + mixed + config.query_size + inner) / ranks
    masks, scores = 0.0, config.num_heads / ranks * batch.keys
    if config.dropout:
        elements += 2 * scores
        masks = scores + 2 * width / between
    elif batch.attention is Attention.fused_softmax or (
        batch.attention is Attention.matmul and batch.length <= QUERY_BLOCK
    ):
        elements += scores
    return round(batch.tokens * (elements * batch.itemsize + masks))


def _inner(config: GPTConfig, outputs: int) -> float:
    """Return the mean number of elements that a layer's MLP or experts keep of a token in their hidden layer, which the
    tensor axis divides: those before the activation, and `outputs` times those after it."""
    share, moe, expert = config.moe_layers / config.num_layers, config.moe, config.expert_size
    chosen = (moe.top_k + moe.shared) * (config.up_width(expert) + outputs * expert)
    return (1 - share) * (config.up_size + outputs * config.ffn_size) + share * chosen


def _rows(config: GPTConfig, itemsize: int) -> float:
    """Return the mean elements per token that layers of experts keep besides: rows to and from the experts, and three
    fp32 copies of the scores."""
    share, moe = config.moe_layers / config.num_layers, config.moe
    return share * (2 * moe.top_k * config.d_model + 3 * moe.experts * 4 / itemsize)


def scores_bytes(config: GPTConfig, batch: MicroBatch) -> int:
    """Return the temporary bytes of explicit attention scores in one transformer block: scores, probabilities and
    gradients, for one block of queries at a time. SDPA needs almost none."""
    if batch.attention not in WRITTEN_OUT:
        return 0
    rows = batch.sequences * (config.num_heads // batch.tensor) * min(batch.length, QUERY_BLOCK)
    return round(3 * rows * batch.length * batch.context * batch.itemsize)


def head_bytes(config: GPTConfig, batch: MicroBatch) -> int:
    """Return the bytes of the head: one chunk of logits, the gradients that it computes with the loss, and the final
    norm's input."""
    rows = config.padded_vocab_size // batch.tensor
    logits = min(batch.tokens, logit_rows(batch.device, batch.tokens, rows, batch.itemsize)) * rows * batch.itemsize
    return logits + (rows + 3 * batch.tokens) * config.d_model * batch.itemsize
