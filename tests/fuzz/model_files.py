"""Descriptions of models."""

from pathlib import Path

import torch
from fuzz.mutations import json_files
from fuzz.reader import Reader, reader
from hypothesis import strategies as st

from gptlite.checkpoint.huggingface import read_object
from gptlite.satellites.huggingface.adapters import all_adapters

ADAPTERS = {each.model_type: each for each in all_adapters()}
GPT2 = {
    **{
        "model_type": "gpt2",
        "vocab_size": 50,
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": None,
    },
    **{"activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "pruned_heads": {}},
    **{"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True, "scale_attn_weights": True},
}
LLAMA = {
    **{
        "model_type": "llama",
        "vocab_size": 50,
        "max_position_embeddings": 16,
        "hidden_size": 8,
        "intermediate_size": 16,
    },
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_act": "silu"},
    **{
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8,
    },
}
QWEN = LLAMA | {
    **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"norm_topk_prob": True, "router_aux_loss_coef": 0.01, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "rope_scaling": None,
}
META = {
    **{"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 50, "multiple_of": 8, "norm_eps": 1e-5},
    **{"ffn_dim_multiplier": 1.5, "rope_theta": 500000.0, "use_scaled_rope": True, "max_seq_len": 16},
}


@reader
def huggingface_config(folder: Path) -> Reader:
    """config.json of a GPT-2, a Llama or a mixture of experts, up to the list of its weights."""
    path = folder / "config.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        found = read_object(path)
        adapter = ADAPTERS.get(found["model_type"]) if isinstance(found.get("model_type"), str) else None
        if adapter is not None:
            config = adapter.from_json(found, "name")
            if config.num_layers < 100:
                list(adapter.weights(config))

    return Reader(st.one_of(*map(json_files, (GPT2, LLAMA, QWEN))), read)


@reader
def meta_params(folder: Path) -> Reader:
    """params.json of Meta's weights."""
    path, llama = folder / "params.json", ADAPTERS["llama"]
    shapes = {
        **{"tok_embeddings.weight": (50, 8), "output.weight": (50, 8), "norm.weight": (8,)},
        **{"layers.0.attention.wq.weight": (8, 8), "layers.0.attention.wk.weight": (4, 8)},
        **{"layers.0.attention.wv.weight": (4, 8), "layers.0.attention.wo.weight": (8, 8)},
        **{"layers.0.feed_forward.w1.weight": (32, 8), "layers.0.feed_forward.w2.weight": (8, 32)},
        **{"layers.0.feed_forward.w3.weight": (32, 8)},
        **{"layers.0.attention_norm.weight": (8,), "layers.0.ffn_norm.weight": (8,)},
    }
    shards = [{name: torch.zeros(shape) for name, shape in shapes.items()}]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        if made := llama.from_meta(read_object(path), shards):
            llama.from_json(made[0], "name")

    return Reader(json_files(META), read)
