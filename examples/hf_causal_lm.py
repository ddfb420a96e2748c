"""Causal language models from Hugging Face's transformers on token data: plugins=[examples.hf_causal_lm] model=hf."""

from dataclasses import dataclass
from typing import Any

from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec


@dataclass
class CausalLMConfig(ModelConfig):  # noqa: D101
    peak_lr: float = 0.001
    vocab_size: int | None = None  # null: the tokenizer's vocabulary size
    architecture: str = "llama"
    settings: Any = None  # configuration of the architecture, e.g. model.settings='{hidden_size: 64}'


class CausalLMSpec(ModelSpec):  # noqa: D101
    name, schema = "hf", CausalLMConfig

    def build(self, config, ops, seed):
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = {"vocab_size": config.vocab_size, "use_cache": False} | (config.settings or {})
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.architecture, **settings))


register_model(CausalLMSpec())
