"""Conversion of a GPT with experts to Hugging Face's Mixtral, Qwen3-MoE and OLMoE.

Hugging Face stores the matrices of each expert as separate tensors; here, a layer has two tensors for all its experts.
None of the classes has a bias for selecting experts, so a model with a `bias_rate` other than 0 is refused, and
imported models have `bias_rate=0`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gptlite.errors import ConfigError
from gptlite.limits import EXPERTS
from gptlite.models.gpt.config import GPTConfig, MLPKind, MoEConfig, Score
from gptlite.satellites.huggingface.adapter import Weight
from gptlite.satellites.huggingface.gpt2 import unlike
from gptlite.satellites.huggingface.keys import flag, whole
from gptlite.satellites.huggingface.llama import FIXED, OF_LLAMA, Llama, of_pairs

if TYPE_CHECKING:
    from torch import Tensor


class WithExperts(Llama):
    """A Llama with experts.

    `block`: name of the module with a layer's experts. `matrices`: names of an expert's gate, up and down projections.
    `count`, `width`: the keys of config.json with the number of experts, and with the width of an expert.
    """

    qk_norm_heads = True
    block: str
    matrices: tuple[str, str, str]
    count = "num_experts"
    width = "intermediate_size"
    aliases: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    ignored: Sequence[str] = ()

    def _mlp(self, config: GPTConfig, layer: int, theirs: str, ours: str) -> Iterator[Weight]:
        if not config.has_experts(layer):
            yield from super()._mlp(config, layer, theirs, ours)
            return
        width, inner, experts = config.d_model, config.expert_size, config.moe.experts
        up, down = (experts, config.up_width(inner), width), (experts, width, inner)
        router = (experts, width)
        yield Weight(f"{theirs}{self.block}.gate.weight", router, f"{ours}mlp.router.weight", router)
        for expert in range(experts):
            prefix, (*pair, last) = f"{theirs}{self.block}.experts.{expert}.", self.matrices
            for place, name in enumerate(pair):
                view = partial(_of_expert, expert=expert, place=place)
                yield Weight(f"{prefix}{name}.weight", (inner, width), f"{ours}mlp.experts.up", up, view)
            view = partial(_of_expert, expert=expert)
            yield Weight(f"{prefix}{last}.weight", (width, inner), f"{ours}mlp.experts.down", down, view)

    def related(self, config: GPTConfig) -> bool:
        return config.moe.experts > 0

    def differences(self, config: GPTConfig) -> list[str]:
        moe = config.moe
        values = OF_LLAMA | {"qk_norm": self.qk_norm, "qk_norm_heads": self.qk_norm_heads}
        mismatches = unlike(config, values, mlp={MLPKind.swiglu}, moe=True)
        if not moe.experts:
            return [*mismatches, "model.moe.experts=0"]
        values = {"shared": 0, "score": Score.softmax, "bias_rate": 0.0, **self.of_moe()}
        differ = {key: each for key, value in values.items() if (each := getattr(moe, key)) != value}
        return [*mismatches, *(f"model.moe.{key}={getattr(value, 'value', value)}" for key, value in differ.items())]

    def of_moe(self) -> dict[str, Any]:
        """Return the values of MoEConfig that all models of the class have."""
        return {}

    def from_json(self, content: Mapping[str, Any], name: str) -> GPTConfig:
        """Return the configuration that a config.json describes. Raises ConfigError, naming the key, for unsupported
        values."""
        read = self.read(content, self.title)
        moe = MoEConfig(
            experts=whole(read, self.count),
            top_k=whole(read, "num_experts_per_tok"),
            d_ff=whole(read, self.width),
            every=whole({"decoder_sparse_step": 1} | read, "decoder_sparse_step"),
            renormalize=flag({"norm_topk_prob": True} | read, "norm_topk_prob"),
            bias_rate=0.0,
        )
        config = replace(super().from_json(content, name), moe=moe, qk_norm_heads=self.qk_norm_heads)
        if moe.experts * config.num_layers > EXPERTS * moe.every:
            words = f"{moe.experts} experts in {config.num_layers} layers"
            raise ConfigError(f"config.json: {words} are more than {EXPERTS:,} experts")
        return config


class Mixtral(WithExperts):
    """Hugging Face's Mixtral."""

    model_type = "mixtral"
    model_class = "MixtralForCausalLM"
    title = "Mixtral"
    block = "block_sparse_moe"
    matrices = ("w1", "w3", "w2")
    count = "num_local_experts"
    defaults: ClassVar[dict[str, Any]] = Llama.defaults | {
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "num_local_experts": 8},
    }
    fixed: ClassVar[dict[str, Any]] = FIXED | {
        **{"sliding_window": None, "router_jitter_noise": 0.0},
        "norm_topk_prob": True,  # the class always renormalizes
    }
    aliases: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}

    def of_moe(self) -> dict[str, Any]:
        return {"every": 1, "renormalize": True}

    def to_json(self, config: GPTConfig, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        moe = {"num_local_experts": config.moe.experts, "num_experts_per_tok": config.moe.top_k}
        moe |= {"intermediate_size": config.expert_size, "sliding_window": None, "router_jitter_noise": 0.0}
        return super().to_json(config, torch_dtype, eod) | moe


class Qwen3MoE(WithExperts):
    """Hugging Face's Qwen3-MoE."""

    model_type = "qwen3_moe"
    model_class = "Qwen3MoeForCausalLM"
    title = "Qwen3-MoE"
    qk_norm = True
    block = "mlp"
    matrices = ("gate_proj", "up_proj", "down_proj")
    width = "moe_intermediate_size"
    defaults: ClassVar[dict[str, Any]] = Llama.defaults | {
        **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24},
        **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "moe_intermediate_size": 768},
        **{"num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False, "decoder_sparse_step": 1},
    }
    fixed: ClassVar[dict[str, Any]] = FIXED | {"mlp_only_layers": []}
    ignored = ("sliding_window", "max_window_layers")  # without use_sliding_window

    def to_json(self, config: GPTConfig, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        moe = {"num_experts": config.moe.experts, "num_experts_per_tok": config.moe.top_k, "mlp_only_layers": []}
        moe |= {"moe_intermediate_size": config.expert_size, "norm_topk_prob": config.moe.renormalize}
        return super().to_json(config, torch_dtype, eod) | moe | {"decoder_sparse_step": config.moe.every}


class OLMoE(WithExperts):
    """Hugging Face's OLMoE, which normalizes queries and keys over all heads together."""

    model_type = "olmoe"
    model_class = "OlmoeForCausalLM"
    title = "OLMoE"
    qk_norm, qk_norm_heads = True, False
    block = "mlp"
    matrices = ("gate_proj", "up_proj", "down_proj")
    defaults: ClassVar[dict[str, Any]] = Llama.defaults | {
        **{"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16},
        **{"num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        **{"num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False},
    }
    fixed: ClassVar[dict[str, Any]] = FIXED | {"clip_qkv": None}

    def of_moe(self) -> dict[str, Any]:
        return {"every": 1}

    def to_json(self, config: GPTConfig, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        moe = {"num_experts": config.moe.experts, "num_experts_per_tok": config.moe.top_k, "clip_qkv": None}
        moe |= {"intermediate_size": config.expert_size, "norm_topk_prob": config.moe.renormalize}
        return super().to_json(config, torch_dtype, eod) | moe


def _of_expert(ours: Tensor, expert: int, place: int | None = None) -> Tensor:
    """Return an expert's matrix. With `place`, rows of gate and up projection alternate in that matrix; return the rows
    of the gate (0) or of the up projection (1)."""
    return ours[expert] if place is None else of_pairs(ours[expert], place)
