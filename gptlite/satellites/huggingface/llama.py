"""Conversion of a GPT to Hugging Face's Llama, Qwen3 and Mistral: parameter names, shapes, config.json.

Hugging Face has three matrices for queries, keys and values, and two for the MLP's gate and up projections. Here, the
three are one matrix with rows grouped by head, and the two are one matrix with rows grouped by hidden unit. In both
formats, RoPE pairs rows i and i + width / 2 of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gptlite.documents import shown
from gptlite.errors import ConfigError, did_you_mean
from gptlite.models.gpt.config import GPTConfig, MLPKind, Norm, Position
from gptlite.satellites.huggingface.adapter import Adapter, ConvertedTensor, Weight
from gptlite.satellites.huggingface.gpt2 import rows, unlike
from gptlite.satellites.huggingface.keys import Keys, flag, number, whole

if TYPE_CHECKING:
    from torch import Tensor

# Keys of config.json that change the model, each with its only supported value.
FIXED = {
    **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    **{"use_sliding_window": False, "rope_interleaved": False, "quantization_config": None},
    **{"add_cross_attention": False, "is_encoder_decoder": False},
}
ROPE = {"rope_theta": 10000.0, "rope_parameters": None, "rope_scaling": None, "original_max_position_embeddings": None}
# Values that these keys of GPTConfig must have in a Llama.
OF_LLAMA = {
    **{"position": Position.rope, "norm": Norm.rms_norm, "norm_gain": True, "bias": False, "dropout": 0.0},
    **{"softcap": None, "windows": [], "value_residual": False, "qk_norm_heads": True},
}
SCALING = {
    "rope_scaling": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}


class Llama(Adapter[GPTConfig], Keys):
    """Hugging Face's Llama, versions 1 to 3."""

    model_type = "llama"
    model_class = "LlamaForCausalLM"
    title = "Llama"
    qk_norm = False
    defaults: ClassVar[dict[str, Any]] = {
        **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
        **{"initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "layer_types": None},
        **{"partial_rotary_factor": None, **ROPE},
    }
    fixed: ClassVar[dict[str, Any]] = FIXED
    ignored: Sequence[str] = ("pretraining_tp", "max_sequence_length")

    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        assert config.vocab_size is not None
        width, table = config.d_model, (config.vocab_size, config.d_model)
        padded, unpadded = (config.padded_vocab_size, width), partial(rows, count=config.vocab_size)
        yield Weight("model.embed_tokens.weight", table, "token_embedding.weight", padded, unpadded)
        for layer in range(config.num_layers):
            yield from self._layer(config, layer, f"model.layers.{layer}.", f"layers.{layer}.")
        yield Weight("model.norm.weight", (width,), "final_norm.weight", (width,))
        if not config.tied_embeddings:
            yield Weight("lm_head.weight", table, "head.weight", padded, unpadded)

    def _layer(self, config: GPTConfig, layer: int, theirs: str, ours: str) -> Iterator[Weight]:
        width, head = config.d_model, config.head_width
        queries, keys, qkv = config.query_size, config.num_kv_heads * head, (config.qkv_size, width)
        for name, size, place in (("q", queries, slice(-2)), ("k", keys, -2), ("v", keys, -1)):
            view = partial(_of_heads, kv_heads=config.num_kv_heads, width=head, place=place)
            yield Weight(f"{theirs}self_attn.{name}_proj.weight", (size, width), f"{ours}attn.qkv.weight", qkv, view)
        yield Weight(f"{theirs}self_attn.o_proj.weight", (width, queries), f"{ours}attn.proj.weight", (width, queries))
        for name, size in (("q_norm", queries), ("k_norm", keys)) if config.qk_norm else ():
            shape = (head if config.qk_norm_heads else size,)
            yield Weight(f"{theirs}self_attn.{name}.weight", shape, f"{ours}attn.{name}.weight", shape)
        yield from self._mlp(config, layer, theirs, ours)
        yield Weight(f"{theirs}input_layernorm.weight", (width,), f"{ours}attn_norm.weight", (width,))
        yield Weight(f"{theirs}post_attention_layernorm.weight", (width,), f"{ours}mlp_norm.weight", (width,))

    def _mlp(self, config: GPTConfig, layer: int, theirs: str, ours: str) -> Iterator[Weight]:
        width, inner, up = config.d_model, config.ffn_size, (config.up_size, config.d_model)
        for place, name in enumerate(("gate", "up")):
            view = partial(of_pairs, place=place)
            yield Weight(f"{theirs}mlp.{name}_proj.weight", (inner, width), f"{ours}mlp.up.weight", up, view)
        yield Weight(f"{theirs}mlp.down_proj.weight", (width, inner), f"{ours}mlp.down.weight", (width, inner))

    def related(self, config: GPTConfig) -> bool:
        return not config.moe.experts

    def differences(self, config: GPTConfig) -> list[str]:
        return unlike(config, OF_LLAMA | {"qk_norm": self.qk_norm}, mlp={MLPKind.swiglu})

    def from_meta(
        self, params: Mapping[str, Any], shards: Sequence[Mapping[str, Tensor]]
    ) -> tuple[dict[str, Any], list[ConvertedTensor]] | None:
        from gptlite.satellites.huggingface.meta_llama import from_meta

        return from_meta(params, shards)

    def canonical(self, name: str) -> str | None:
        return None if name.endswith("rotary_emb.inv_freq") else name

    def copies(self) -> Mapping[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"}

    def to_json(self, config: GPTConfig, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        scaling = None
        if config.rope_scaling != 1:
            scaling = {"rope_type": "llama3"} | {theirs: getattr(config, ours) for ours, theirs in SCALING.items()}
        return {
            "architectures": [self.model_class],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.sequence_length,
            "hidden_size": config.d_model,
            "intermediate_size": config.ffn_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_base,
            "rope_scaling": scaling,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": config.init_std,
            "tie_word_embeddings": config.tied_embeddings,
            "bos_token_id": eod,
            "eos_token_id": eod,
            "torch_dtype": torch_dtype,
        }

    def from_json(self, content: Mapping[str, Any], name: str) -> GPTConfig:
        """Return the configuration that a config.json describes. Raises ConfigError, naming the key, for unsupported
        values."""
        content = self.read(content, self.title)
        _refuse_mixed_layers(content)
        heads, width = whole(content, "num_attention_heads"), whole(content, "hidden_size")
        kv_heads = heads if content["num_key_value_heads"] is None else whole(content, "num_key_value_heads")
        head = width // heads if content["head_dim"] is None else whole(content, "head_dim")
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={heads} is not divisible by num_key_value_heads={kv_heads}"
            )
        return GPTConfig(
            name=name,
            num_layers=whole(content, "num_hidden_layers"),
            num_heads=heads,
            kv_heads=None if kv_heads == heads else kv_heads,
            head_dim=None if head * heads == width else head,
            d_model=width,
            d_ff=whole(content, "intermediate_size"),
            vocab_size=whole(content, "vocab_size"),
            sequence_length=whole(content, "max_position_embeddings"),
            position=Position.rope,
            norm=Norm.rms_norm,
            norm_eps=number(content, "rms_norm_eps"),
            qk_norm=self.qk_norm,
            mlp=MLPKind.swiglu,
            bias=False,
            tied_embeddings=flag(content, "tie_word_embeddings"),
            init_std=number(content, "initializer_range"),
            **_rope(content),
        )


class Qwen3(Llama):
    """Hugging Face's Qwen3: a Llama with norms of queries and keys."""

    model_type = "qwen3"
    model_class = "Qwen3ForCausalLM"
    title = "Qwen3"
    qk_norm = True
    defaults: ClassVar[dict[str, Any]] = Llama.defaults | {
        **{"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128},
        "max_position_embeddings": 32768,
    }
    ignored = ("sliding_window", "max_window_layers")  # without use_sliding_window


class Mistral(Llama):
    """Hugging Face's Mistral: a Llama whose layers all have the same attention window. One without a window is a
    Llama."""

    model_type = "mistral"
    model_class = "MistralForCausalLM"
    title = "Mistral"
    defaults: ClassVar[dict[str, Any]] = Llama.defaults | {
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        "sliding_window": 4096,
    }
    ignored = ()

    def differences(self, config: GPTConfig) -> list[str]:
        found = super().differences(replace(config, windows=[]))
        same = len(set(config.windows)) == 1 and 0 not in config.windows
        return found if same else [*found, f"model.windows={config.windows}"]

    def to_json(self, config: GPTConfig, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        return super().to_json(config, torch_dtype, eod) | {"sliding_window": config.windows[0]}

    def from_json(self, content: Mapping[str, Any], name: str) -> GPTConfig:
        """Return the configuration that a config.json describes. Raises ConfigError, naming the key, for unsupported
        values."""
        read = self.read(content, self.title)
        windows = [] if read["sliding_window"] is None else [whole(read, "sliding_window")]
        return replace(super().from_json(content, name), windows=windows)


def _refuse_mixed_layers(content: Mapping[str, Any]) -> None:
    kinds = content["layer_types"]
    if kinds is not None and (not isinstance(kinds, list) or any(each != "full_attention" for each in kinds)):
        raise ConfigError(f'config.json: layer_types={shown(kinds)}: only "full_attention" can be imported')


def _rope(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration keys of RoPE, from `rope_theta` and `rope_scaling`, or from `rope_parameters` in files
    of transformers 5, where `rope_scaling` takes precedence."""
    place = "rope_scaling" if content["rope_scaling"] else "rope_parameters"
    rope = content[place] or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json: {place}={shown(rope)} must be an object or null")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f'config.json: rope_type={shown(kind)}: only "default" and "llama3" can be imported')
    rope = {**content, **rope}
    if rope["partial_rotary_factor"] not in (None, 1):
        words = shown(rope["partial_rotary_factor"])
        raise ConfigError(f"config.json: partial_rotary_factor={words}: only partial_rotary_factor=1 can be imported")
    _refuse_other_keys(content[place] or {}, kind, place)
    base = {"rope_base": number(rope, "rope_theta")}
    return base if kind == "default" else base | _scaled(content, rope, place)


def _refuse_other_keys(found: Mapping[str, Any], kind: str, place: str) -> None:
    known = ["rope_type", "type", "rope_theta", "partial_rotary_factor"]
    known += SCALING.values() if kind == "llama3" else ()
    for key, value in found.items():
        if key not in known and value is not None:
            fix = did_you_mean(key, known) or "; remove it"
            words = f"{place}.{key}={shown(value)} is not a key of rope_type={shown(kind)}"
            raise ConfigError(f"config.json: {words}{fix}")


def _scaled(content: Mapping[str, Any], rope: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the configuration keys of Llama 3's scaling. Without an original length, it is the whole length."""
    *keys, last = SCALING.values()
    for key in keys:
        if rope.get(key) is None:
            raise ConfigError(f'config.json: {place} has no {key}, which rope_type="llama3" needs; add it')
    factor, low, high = (number(rope, key) for key in keys)
    if not factor or not low < high:
        words = f"{place} has factor={factor:g}, low_freq_factor={low:g} and high_freq_factor={high:g}"
        raise ConfigError(f"config.json: {words}; the first must be above 0, and the last above the second")
    # As in transformers, the key beside the object takes precedence.
    lengths = content[last], (content[place] or {}).get(last), content["max_position_embeddings"]
    length = whole({last: next((each for each in lengths if each is not None), None)}, last)
    return dict(zip(SCALING, (factor, low, high, length), strict=True))


def _of_heads(ours: Tensor, kv_heads: int, width: int, place: int | slice) -> Tensor:
    """Return the rows of queries, keys or values: those at `place` of each group [query heads per key head + 2, D,
    d]."""
    return ours.unflatten(0, (kv_heads, -1, width))[:, place]


def of_pairs(ours: Tensor, place: int) -> Tensor:
    """Return every second row, from `place` on."""
    return ours[place::2]
