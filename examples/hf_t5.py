"""T5 that learns to reverse sequences, with samples that are dicts: plugins=[examples.hf_t5] model=t5 data=reversed."""

from dataclasses import dataclass

from examples.hf_causal_lm import CausalLMConfig
from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec


@dataclass
class T5Config(CausalLMConfig):  # noqa: D101
    vocab_size: int | None = 32


class T5Spec(ModelSpec):  # noqa: D101
    name, schema, reads = "t5", T5Config, "samples"

    def build(self, config, ops, seed):
        from transformers import T5Config, T5ForConditionalGeneration

        settings = {"vocab_size": config.vocab_size, "use_cache": False, "decoder_start_token_id": 0}
        return T5ForConditionalGeneration(T5Config(**settings | (config.settings or {})))

    def forward(self, part, x, inputs):
        shifted = part.prepare_decoder_input_ids_from_labels(inputs.targets)
        return super().forward(part, {**x, "decoder_input_ids": shifted}, inputs)


@dataclass
class ReversedConfig(DatasetConfig):  # noqa: D101
    length: int = 8


def open_reversed(config):
    """Return training and validation samples `{input_ids, labels}` of random token ids from 2 to 31."""
    import torch

    ids = torch.randint(2, 32, (4096, config.length), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row.flip(0)} for row in ids]
    return samples[:-256], samples[-256:]


register_model(T5Spec())
register_data("reversed", ReversedConfig, open_reversed)
