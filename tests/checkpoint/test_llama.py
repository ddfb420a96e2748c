"""Llama and its relatives of transformers: equal logits and text here, and the same bits back."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint.huggingface_models import Save, committed, redraw, restored
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from gptlite.errors import ConfigError
from gptlite.models.capabilities import Sampling
from gptlite.models.gpt.generate import generate
from gptlite.models.gpt.model import GPT
from gptlite.satellites.checkpoint_tool.huggingface import export, import_

VOCABULARY = 53
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3},
}
SCALED = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": SCALED, "num_key_value_heads": 1}),
    "llama_heads": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 10, "rope_parameters": {"rope_theta": 1e6}}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3_moe_step": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN3_MOE | {"decoder_sparse_step": 2}),
}
TINY = [
    *("model.num_layers=2", "model.num_heads=4", "model.kv_heads=2", "model.d_model=24", "model.sequence_length=64"),
    *("model.position=rope", "model.norm=rms_norm", "model.mlp=swiglu", "model.bias=false", "model.d_ff=40"),
    *("model.tied_embeddings=false", f"data.vocab_size={VOCABULARY}", f"model.vocab_size={VOCABULARY}"),
]


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that transformers has saved."""
    kind, config, changes = MODELS[request.param]
    torch.manual_seed(0)
    model = kind(config(**SIZES | changes))
    redraw(model, "norm.weight", 1.0)
    folder = tmp_path_factory.mktemp(request.param) / "theirs"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def imported(folder: Path) -> Path:
    """The checkpoint that it was imported to."""
    return import_(folder, folder.parent / "run")


@torch.no_grad()
def logits(model: GPT, tokens: Tensor) -> Tensor:
    return torch.stack([model(tokens[:, : end + 1], None) for end in range(tokens.shape[1])], 1)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    return committed(tmp_path)


def tokens_of(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def test_logits_and_greedy_text_are_those_of_transformers(folder, imported):
    ours, tokens = restored(imported), tokens_of(40)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        torch.testing.assert_close(logits(ours, tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        expected = theirs.generate(tokens[:1], attention_mask=torch.ones_like(tokens[:1]), **options)
    greedy = Sampling(temperature=0)
    for cache in (True, False):
        found = list(generate(ours, tokens[0].tolist(), 20, greedy, cache=cache))
        assert found == expected[0, 40:].tolist()


def test_an_import_is_exported_bit_for_bit(folder, imported, tmp_path):
    export(imported, tmp_path / "out")
    before, after = (safetensors.torch.load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", []),
        ("qwen3", ["model.qk_norm=true", "model.head_dim=8"]),
        ("llama", ["model.rope_scaling=4"]),
        ("mistral", ["model.windows=[9,9]"]),
    ],
    ids=str,
)
def test_a_model_from_here_has_equal_logits_in_transformers(save, tmp_path, kind, more):
    step, model = save(*TINY, *more)
    export(step, tmp_path / "out")
    theirs, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), tokens_of(40)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, logits(model.eval(), tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.mlp=geglu"], "Llama has no model.mlp=geglu"),
        (["model.softcap=15"], "Llama has no model.softcap=15.0"),
        (["model.windows=[8,0]"], "Llama has no model.windows=[8, 0]"),
        (["model.windows=[8]", "model.softcap=15"], "Mistral has no model.softcap=15.0"),
        (["model.value_residual=true"], "Llama has no model.value_residual=True"),
        (["model.norm=layer_norm", "model.bias=true"], "Llama has no model.norm=layer_norm, model.bias=True"),
        (["model.moe.experts=4"], "Mixtral has no model.moe.bias_rate=0.001"),
        (["model.position=learned", "model.softcap=3"], "Llama has no model.position=learned, model.softcap=3.0"),
    ],
)
def test_what_no_class_has_is_named(save, tmp_path, overrides, words):
    step, _ = save(*TINY, *overrides)
    with pytest.raises(ConfigError, match=re.escape(words)):
        export(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act="gelu": only hidden_act="silu"'),
        ({"attention_bias": True}, "attention_bias=true"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            'rope_type="yarn": only "default" and "llama3"',
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not divisible by num_key_value_heads=3"),
        ({"intermediate_size": 0}, "intermediate_size=0 must be a whole number"),
    ],
    ids=str,
)
def test_a_config_of_something_else_is_refused(tmp_path, changes: dict[str, Any], words):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError) as refusal:
        import_(tmp_path / "theirs", tmp_path / "run")
    assert words in str(refusal.value)
    assert not (tmp_path / "run").exists()
