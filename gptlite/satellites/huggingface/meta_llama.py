"""Conversion of Llama 2 and 3 from Meta's files, params.json and sharded weights, to Hugging Face's config.json and
tensors.

Meta shards matrices over tensor-parallel ranks, one file per rank. Meta's RoPE pairs the adjacent rows 2i and 2i + 1 of
a head. Hugging Face and gptlite pair rows i and i + width / 2, so the rows of queries and keys are reordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gptlite.errors import ConfigError, did_you_mean
from gptlite.satellites.huggingface.adapter import ConvertedTensor
from gptlite.satellites.huggingface.keys import number, whole

if TYPE_CHECKING:
    from torch import Tensor

FILE = "params.json"
# Meta's name, Hugging Face's name, and the sharded dim; None: every file has the whole tensor.
OF_MODEL = (
    ("tok_embeddings", "model.embed_tokens", 1),
    ("norm", "model.norm", None),
    ("output", "lm_head", 0),
)
OF_LAYER = (
    ("attention.wq", "self_attn.q_proj", 0),
    ("attention.wk", "self_attn.k_proj", 0),
    ("attention.wv", "self_attn.v_proj", 0),
    ("attention.wo", "self_attn.o_proj", 1),
    ("feed_forward.w1", "mlp.gate_proj", 0),
    ("feed_forward.w2", "mlp.down_proj", 1),
    ("feed_forward.w3", "mlp.up_proj", 0),
    ("attention_norm", "input_layernorm", None),
    ("ffn_norm", "post_attention_layernorm", None),
)
UNUSED = ("rope.freqs",)  # computed from rope_theta
KEYS = (
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
    *("rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_seq_len", "max_batch_size"),
)


def from_meta(
    params: Mapping[str, Any], shards: Sequence[Mapping[str, Tensor]]
) -> tuple[dict[str, Any], list[ConvertedTensor]]:
    """Return the content of Hugging Face's config.json, and the tensors. Raises ConfigError, naming the key or tensor,
    if the model is not a Llama."""
    for key in params:
        if key not in KEYS:
            raise ConfigError(f"{FILE}: {key} is not a key of Llama 2 or 3{did_you_mean(key, KEYS)}")
    layers, heads, width = (whole(params, key, FILE) for key in ("n_layers", "n_heads", "dim"))
    kv_heads = heads if params.get("n_kv_heads") is None else whole(params, "n_kv_heads", FILE)
    names = {f"{meta}.weight": (f"{theirs}.weight", dim) for meta, theirs, dim in OF_MODEL}
    for layer in range(layers):
        for meta, theirs, dim in OF_LAYER:
            names[f"layers.{layer}.{meta}.weight"] = (f"model.layers.{layer}.{theirs}.weight", dim)
    for name in shards[0]:
        if name not in names and name not in UNUSED:
            raise ConfigError(f"{name} is not a tensor of a Llama with {layers} layers")
    tied = _tied(shards)
    pieces = []
    for meta, (theirs, dim) in names.items():
        if meta == "output.weight" and meta not in shards[0]:
            continue
        parts = [shard[meta] for shard in shards if meta in shard]
        if len(parts) < len(shards):
            raise ConfigError(f"{meta} is missing from {len(shards) - len(parts)} of {len(shards)} files")
        if meta == "tok_embeddings.weight" and parts[0].shape[-1] == width:
            dim = 0  # Llama 3 shards the vocabulary, Llama 2 the hidden size
        turned = {"wq": heads, "wk": kv_heads}.get(meta.split(".")[-2], 0)
        shape = list(parts[0].shape)
        if dim is not None:
            shape[dim] = sum(part.shape[dim] for part in parts)
        pieces.append(ConvertedTensor(theirs, tuple(shape), parts[0].dtype, partial(_whole, parts, dim, turned)))
    rows = next(piece.shape[0] for piece in pieces if piece.name == "model.embed_tokens.weight")
    return _config(params, heads, kv_heads, rows, tied), pieces


def _whole(parts: Sequence[Tensor], dim: int | None, turned: int) -> Tensor:
    """Return a tensor from its shards. `turned`: number of heads whose rows are reordered for Hugging Face; 0 to keep
    the order."""
    import torch

    tensor = parts[0] if dim is None else torch.cat(list(parts), dim)
    if not turned:
        return tensor
    return tensor.unflatten(0, (turned, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _tied(shards: Sequence[Mapping[str, Tensor]]) -> bool:
    """Return True if the output matrix is absent, or equals the embedding, as in Llama 3.2's small models."""
    output, table = "output.weight", "tok_embeddings.weight"
    if table not in shards[0]:
        raise ConfigError(f"{table} is missing")
    return all(output not in s or (s[output].shape == s[table].shape and s[output].equal(s[table])) for s in shards)


def _config(params: Mapping[str, Any], heads: int, kv_heads: int, rows: int, tied: bool) -> dict[str, Any]:
    """Return the content of config.json. Without max_seq_len, the context length is that of the Llama version with
    these RoPE settings."""
    width, multiple = whole(params, "dim", FILE), whole(params, "multiple_of", FILE)
    inner = int(2 * 4 * width / 3)
    if params.get("ffn_dim_multiplier") is not None:
        inner = int(number(params, "ffn_dim_multiplier", file=FILE) * inner)
    vocab_size = params.get("vocab_size", -1)  # -1: the tokenizer's
    base = number({"rope_theta": 10000.0, **params}, "rope_theta", file=FILE)
    scaled = params.get("use_scaled_rope", False)
    length = 131072 if scaled else 8192 if base > 10000 else 4096
    scaling = {
        "rope_type": "llama3",
        # 32 for Llama 3.2's small models, which have tied embeddings; 8 for Llama 3.1.
        "factor": number({"rope_scaling_factor": 32.0 if tied else 8.0, **params}, "rope_scaling_factor", file=FILE),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows if vocab_size == -1 else whole(params, "vocab_size", FILE),
        "hidden_size": width,
        "intermediate_size": -(-inner // multiple) * multiple,
        "num_hidden_layers": whole(params, "n_layers", FILE),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": whole(params, "max_seq_len", FILE) if params.get("max_seq_len") else length,
        "rms_norm_eps": number({"norm_eps": 1e-5, **params}, "norm_eps", file=FILE),
        "rope_theta": base,
        "rope_scaling": scaling if scaled else None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }
