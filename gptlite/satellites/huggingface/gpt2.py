"""Conversion of a GPT to Hugging Face's GPT-2: parameter names, shapes, config.json.

Hugging Face stores a matrix as [in, out] (`Conv1D`). The outputs of its fused QKV projection are ordered q | k | v;
here they are grouped by head. The embedding there has one row per token of the vocabulary; here it is
padded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gptlite.documents import shown
from gptlite.errors import ConfigError, did_you_mean
from gptlite.models.gpt.config import GPTConfig, MLPKind, Norm, Position
from gptlite.satellites.huggingface.adapter import Adapter, Weight, unchanged
from gptlite.satellites.huggingface.keys import Keys, flag, number, whole

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "transformer."  # of names in a GPT2LMHeadModel; GPT2Model has none
# Attention masks, which older versions of transformers stored with the weights.
_BUFFERS = re.compile(r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)")

# Of several names of an activation, an export writes the first.
ACTIVATIONS = {
    "gelu_new": MLPKind.gelu_tanh,
    "gelu_pytorch_tanh": MLPKind.gelu_tanh,
    "gelu": MLPKind.gelu_erf,
    "relu": MLPKind.relu,
}
# Values that these keys of GPTConfig must have in a GPT-2.
OF_GPT2 = {
    **{"kv_heads": None, "head_dim": None, "position": Position.learned, "norm": Norm.layer_norm},
    **{"qk_norm": False, "softcap": None, "windows": [], "value_residual": False},
}


def unlike(config: GPTConfig, values: Mapping[str, Any], mlp: set[MLPKind], moe: bool = False) -> list[str]:
    """Return `model.key=value` for each key whose value is not that in `values`, for an MLP kind that is not in `mlp`,
    and for experts unless `moe` is True.

    `kv_heads` and `head_dim` count as null if they equal their default values.
    """
    if config.kv_heads == config.num_heads:
        config = replace(config, kv_heads=None)
    if config.head_dim is not None and config.head_dim * config.num_heads == config.d_model:
        config = replace(config, head_dim=None)
    found = {key: getattr(config, key) for key, value in values.items() if getattr(config, key) != value}
    found |= {} if config.mlp in mlp else {"mlp": config.mlp}
    found |= {"moe.experts": config.moe.experts} if config.moe.experts and not moe else {}
    return [f"model.{key}={getattr(value, 'value', value)}" for key, value in found.items()]


class GPT2(Adapter[GPTConfig], Keys):
    """Hugging Face's GPT-2."""

    model_type = "gpt2"
    model_class = "GPT2LMHeadModel"
    title = "GPT-2"
    defaults: ClassVar[dict[str, Any]] = {
        **{"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None},
        **{"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
        "tie_word_embeddings": True,
    }
    fixed: ClassVar[dict[str, Any]] = {
        **{"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        **{"pruned_heads": {}, "quantization_config": None, "is_encoder_decoder": False},
    }
    aliases: ClassVar[dict[str, str]] = {
        **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        "max_position_embeddings": "n_positions",
    }
    ignored = (
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("reorder_and_upcast_attn", "n_ctx"),
    )

    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """Yield every parameter, including the biases, which GPT-2 always has. A tied head is not a separate
        parameter."""
        width, inner, vocab_size, padded = config.d_model, config.ffn_size, config.vocab_size, config.padded_vocab_size
        assert vocab_size is not None
        table, unpadded = ((vocab_size, width), (padded, width)), partial(rows, count=vocab_size)
        qkv = partial(_qkv, num_heads=config.num_heads)
        positions = (config.sequence_length, width)
        yield Weight(f"{PREFIX}wte.weight", table[0], "token_embedding.weight", table[1], unpadded)
        yield Weight(f"{PREFIX}wpe.weight", positions, "position_embedding.weight", positions)
        for layer in range(config.num_layers):
            their_prefix, our_prefix = f"{PREFIX}h.{layer}.", f"layers.{layer}."
            for name, ours, size, matrix, vector in (
                ("ln_1", "attn_norm", (width,), unchanged, unchanged),
                ("attn.c_attn", "attn.qkv", (width, 3 * width), qkv, qkv),
                ("attn.c_proj", "attn.proj", (width, width), _transposed, unchanged),
                ("ln_2", "mlp_norm", (width,), unchanged, unchanged),
                ("mlp.c_fc", "mlp.up", (width, inner), _transposed, unchanged),
                ("mlp.c_proj", "mlp.down", (inner, width), _transposed, unchanged),
            ):
                yield Weight(f"{their_prefix}{name}.weight", size, f"{our_prefix}{ours}.weight", size[::-1], matrix)
                bias = f"{our_prefix}{ours}.bias" if config.bias else None
                yield Weight(f"{their_prefix}{name}.bias", size[-1:], bias, size[-1:], vector)
        yield Weight(f"{PREFIX}ln_f.weight", (width,), "final_norm.weight", (width,))
        yield Weight(f"{PREFIX}ln_f.bias", (width,), "final_norm.bias" if config.bias else None, (width,))
        if not config.tied_embeddings:
            yield Weight("lm_head.weight", table[0], "head.weight", table[1], unpadded)

    def related(self, config: GPTConfig) -> bool:
        return not config.moe.experts

    def differences(self, config: GPTConfig) -> list[str]:
        return unlike(config, OF_GPT2, mlp=set(ACTIVATIONS.values()))

    def canonical(self, name: str) -> str | None:
        return None if _BUFFERS.fullmatch(name) else name.removeprefix(PREFIX)

    def copies(self) -> Mapping[str, str]:
        return {"lm_head.weight": "wte.weight"}

    def to_json(self, config: GPTConfig, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        """Return the content of config.json. The end-of-document token is also GPT-2's beginning-of-document token."""
        # Reversed, so that the first of several names is kept.
        activations = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
        return {
            "architectures": [self.model_class],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "n_positions": config.sequence_length,
            "n_embd": config.d_model,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.d_ff,
            "activation_function": activations[config.mlp],
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
            "layer_norm_epsilon": config.norm_eps,
            "initializer_range": config.init_std,
            "tie_word_embeddings": config.tied_embeddings,
            "bos_token_id": eod,
            "eos_token_id": eod,
            "torch_dtype": torch_dtype,
        }

    def from_json(self, content: Mapping[str, Any], name: str) -> GPTConfig:
        """Return the configuration that a config.json describes. Raises ConfigError, naming the key, for unsupported
        values.

        GPT-2's three dropout probabilities become one: the largest.
        """
        content = self.read(content, self.title)
        activation = content["activation_function"]
        if activation not in [*ACTIVATIONS]:
            hint = did_you_mean(str(activation), ACTIVATIONS)
            names = ", ".join(ACTIVATIONS)
            raise ConfigError(f"config.json: activation_function={shown(activation)} is not one of {names}{hint}")
        width, heads = whole(content, "n_embd"), whole(content, "n_head")
        if width % heads:
            raise ConfigError(f"config.json: n_embd={width} is not divisible by n_head={heads}")
        dropouts = [number(content, key, below=1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
        return GPTConfig(
            name=name,
            num_layers=whole(content, "n_layer"),
            num_heads=heads,
            d_model=width,
            d_ff=None if content["n_inner"] is None else whole(content, "n_inner"),
            vocab_size=whole(content, "vocab_size"),
            sequence_length=whole(content, "n_positions"),
            mlp=ACTIVATIONS[activation],
            dropout=max(dropouts),
            tied_embeddings=flag(content, "tie_word_embeddings"),
            norm_eps=number(content, "layer_norm_epsilon"),
            init_std=number(content, "initializer_range"),
        )


def rows(ours: Tensor, count: int) -> Tensor:
    """Return the first `count` rows: those of the vocabulary, without padding."""
    return ours[:count]


def _transposed(ours: Tensor) -> Tensor:
    return ours.t()


def _qkv(ours: Tensor, num_heads: int) -> Tensor:
    """Return rows grouped by head (q, k, v of D rows each) as columns: q of all heads, then k, then v."""
    grouped = ours.unflatten(0, (num_heads, 3, -1))  # [H, 3, D, d], or [H, 3, D]
    return grouped.permute(3, 1, 0, 2) if ours.dim() == 2 else grouped.permute(1, 0, 2)
