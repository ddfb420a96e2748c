"""Every key of config.json: read with transformers' default, refused if it changes the model, or ignored."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.huggingface_models import our_logits, redraw, restored
from checkpoint.test_llama import MODELS as LLAMAS
from checkpoint.test_llama import SCALED
from checkpoint.test_llama import SIZES as LLAMA_SIZES
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel

from gptlite.errors import ConfigError
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.spec import GPTSpec
from gptlite.satellites.checkpoint_tool.huggingface import import_
from gptlite.satellites.huggingface.adapters import BUILT_IN
from gptlite.satellites.huggingface.keys import IGNORED

ADAPTERS: dict[str, Any] = {each.model_type: each for each in BUILT_IN[GPTSpec]}
GPT2_SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 24, "n_positions": 64, "vocab_size": 53, "initializer_range": 0.3}
CLASSES: dict[str, tuple[type[PreTrainedModel], type[PretrainedConfig], dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2_SIZES),
    **{
        name: (kind, config, LLAMA_SIZES | changes)
        for name, (kind, config, changes) in LLAMAS.items()
        if name in ADAPTERS
    },
}
# Keys that an adapter reads, and the class takes without a field for them.
WITHOUT_FIELD = {"rope_theta", "rope_scaling", "original_max_position_embeddings", "partial_rotary_factor"}
WITHOUT_FIELD |= {"head_dim", "layer_types"}
NO_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Other values, of keys whose default is null or a word.
OTHERS = {
    **{"num_key_value_heads": 2, "head_dim": 20, "n_inner": 40, "rope_parameters": SCALED, "rope_scaling": SCALED},
    **{"original_max_position_embeddings": 32, "layer_types": ["sliding_attention"], "partial_rotary_factor": 0.5},
    **{"activation_function": "relu", "mlp_only_layers": [0], "quantization_config": {"bits": 4}, "clip_qkv": 8.0},
    **{"sliding_window": 8, "pruned_heads": {"0": [1]}, "hidden_act": "gelu"},
}


def other(key: str, value: Any) -> Any:
    """A value that is not a key's default."""
    if isinstance(value, str) or (key in OTHERS and value in (None, [], {})):
        return OTHERS.get(key, "other")
    return not value if isinstance(value, bool) else value * 2 or 0.5


def read(adapter: Any, content: dict[str, Any]) -> GPTConfig | str:
    """The configuration of a config.json, or why it is refused."""
    try:
        return adapter.from_json(content, "a")
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_field_of_the_class_is_read_fixed_or_ignored(name: str):
    adapter, (_, kind, _) = ADAPTERS[name], CLASSES[name]
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    every = fields.keys() | kind().to_dict().keys() - {"_name_or_path"}
    known = {*adapter.defaults, *adapter.fixed, *adapter.aliases, *adapter.ignored, *IGNORED}
    assert every - known == set()
    assert adapter.aliases.items() <= {**kind.attribute_map, **{v: k for k, v in kind.attribute_map.items()}}.items()
    assert kind.attribute_map.keys() - known == set()
    assert adapter.defaults.keys() - fields.keys() <= WITHOUT_FIELD
    for key, value in {**adapter.defaults, **adapter.fixed}.items():
        theirs = getattr(kind(), "default_theta", None) if key == "rope_theta" else fields.get(key, value)
        assert theirs == value or not (theirs or value), key


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_read_or_fixed_matters_and_what_is_ignored_does_not(name: str):
    adapter = ADAPTERS[name]
    base = {} if name == "gpt2" else {"rope_parameters": NO_SCALING}
    before = read(adapter, base)
    assert isinstance(before, GPTConfig)
    for key, value in adapter.defaults.items():
        found = read(adapter, base | {key: other(key, value)})
        # The first of three rates that are one here.
        assert found != before or key in ("embd_pdrop", "attn_pdrop"), key
    for key, value in adapter.fixed.items():
        assert f"config.json: {key}=" in str(read(adapter, base | {key: other(key, value)})), key
        assert read(adapter, base | {key: value}) == before
    for key in (*IGNORED, *adapter.ignored):
        assert read(adapter, base | {key: "any"}) == before, key


def saved(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    """A tiny model that transformers has saved."""
    model_kind, config_kind, sizes = CLASSES[name]
    torch.manual_seed(0)
    model = model_kind(config_kind(**sizes | changes))
    redraw(model, "norm.weight", 1.0)
    model.save_pretrained(folder)
    return folder


def rewritten(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(content))


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()(tokens).logits


def check_logits(folder: Path, run: Path) -> Tensor:
    """Import a model, and compare it with transformers' reading of the same folder."""
    tokens = torch.randint(53, (2, 60), generator=torch.Generator().manual_seed(1))
    theirs = their_logits(folder, tokens)
    torch.testing.assert_close(our_logits(restored(import_(folder, run)), tokens), theirs, rtol=1e-5, atol=2e-5)
    return theirs


@pytest.mark.parametrize("name", CLASSES)
def test_missing_keys_have_the_defaults_of_their_class(name: str, tmp_path: Path):
    sizes = {key: value for key, value in CLASSES[name][2].items() if key != "norm_topk_prob"}
    folder = saved(name, tmp_path / "theirs", {})
    rewritten(folder, {"model_type": name, **sizes})
    check_logits(folder, tmp_path / "run")


@pytest.mark.parametrize("name", CLASSES)
def test_ignored_keys_do_not_change_the_logits_of_transformers(name: str, tmp_path: Path):
    """Else they would have to be read or refused."""
    fields = {field.name: field.default for field in dataclasses.fields(CLASSES[name][1])}
    ignored = {*IGNORED, *ADAPTERS[name].ignored} & fields.keys() - {"return_dict"}
    changes = {key: other(key, fields[key]) for key in ignored if isinstance(fields[key], bool | int | float)}
    changes |= {"summary_type": "mean"} if name == "gpt2" else {"pretraining_tp": 2}
    assert len(changes) >= 5
    folder, tokens = saved(name, tmp_path / "theirs", {}), torch.arange(50)[None]
    before, content = their_logits(folder, tokens), json.loads((folder / "config.json").read_text())
    rewritten(folder, content | changes | {"temperature": 0.5, "max_sequence_length": 3})
    torch.testing.assert_close(their_logits(folder, tokens), before, rtol=1e-5, atol=1e-5)


OTHER_BASE = {"rope_theta": 300.0}
ROPES: dict[str, dict[str, Any]] = {
    "both": {"rope_parameters": OTHER_BASE | {"rope_type": "default"}, "rope_scaling": SCALED},
    "both, with a base of the whole file": {"rope_parameters": OTHER_BASE, "rope_scaling": NO_SCALING, **OTHER_BASE},
    "a base that is not taken": {"rope_parameters": OTHER_BASE | {"rope_type": "default"}, "rope_scaling": NO_SCALING},
    "no length": {"rope_parameters": NO_SCALING | OTHER_BASE, "max_position_embeddings": 256},
    "a length beside it": {"rope_scaling": SCALED, "original_max_position_embeddings": 32},
    "an older name": {"rope_scaling": {"type": "llama3", **{k: v for k, v in SCALED.items() if k != "rope_type"}}},
    "a base alone": {"rope_parameters": None, **OTHER_BASE},
    "an unused YaRN": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "rope_scaling": SCALED},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama") / "theirs", {})


@pytest.mark.parametrize("case", ROPES)
def test_rope_is_read_as_in_transformers(case: str, llama: Path, tmp_path: Path):
    folder = Path(shutil.copytree(llama, tmp_path / "theirs"))
    content = json.loads((folder / "config.json").read_text())
    content.pop("rope_parameters")
    plain = check_logits(folder, tmp_path / "before")
    rewritten(folder, content | ROPES[case])
    assert (check_logits(folder, tmp_path / "run") - plain).abs().max() > 0.1


def without(key: str) -> dict[str, Any]:
    return {"rope_scaling": {name: value for name, value in SCALED.items() if name != key}}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "YaRN beside the default": (
        "llama",
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        'rope_type="yarn": only "default" and "llama3" can be imported',
    ),
    "no low factor": ("llama", without("low_freq_factor"), "rope_scaling has no low_freq_factor"),
    "no factor": ("llama", without("factor"), "rope_scaling has no factor"),
    "a factor of 0": ("llama", {"rope_scaling": SCALED | {"factor": 0}}, "factor=0, low_freq_factor=1"),
    "equal factors": ("llama", {"rope_scaling": SCALED | {"high_freq_factor": 1}}, "the last above the second"),
    "a length of 0": (
        "llama",
        {"rope_scaling": SCALED | {"original_max_position_embeddings": 0}},
        "original_max_position_embeddings=0 must be a whole number",
    ),
    "another key of RoPE": ("llama", {"rope_scaling": SCALED | {"mscale": 2}}, "rope_scaling.mscale=2 is not a key of"),
    "a list": ("llama", {"rope_scaling": [1]}, "rope_scaling=[1] must be an object or null"),
    "part of a head": ("llama", {"partial_rotary_factor": 0.5}, "only partial_rotary_factor=1 can be imported"),
    "a misspelled key": (
        "llama",
        {"rms_norm_epsilon": 1e-3},
        "rms_norm_epsilon=0.001 is not a key of Llama; did you mean rms_norm_eps?",
    ),
    "an unknown key": (
        "gpt2",
        {"residual_scale": 2},
        "residual_scale=2 is not a key of GPT-2; remove it if the weights do not depend on it",
    ),
    "layers of another kind": (
        "qwen3",
        {"layer_types": ["full_attention", "x"]},
        'layer_types=["full_attention", "x"]',
    ),
    "two names": ("gpt2", {"hidden_size": 3, "n_embd": 4}, "hidden_size=3 and n_embd=4 differ; keep one of them"),
    "no sparse step": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be a whole number"),
    "a sparse step of another class": ("mixtral", {"decoder_sparse_step": 2}, "is not a key of Mixtral"),
    "a word for a bool": ("olmoe", {"norm_topk_prob": "false"}, 'norm_topk_prob="false" must be true or false'),
    "a stray bool": ("mixtral", {"norm_topk_prob": False}, "only norm_topk_prob=true can be imported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_changes_the_model_is_refused(case: str):
    name, content, words = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        ADAPTERS[name].from_json(content, "a")
    assert str(refusal.value).startswith("config.json: ")
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_stray_key_that_agrees_with_the_class_is_taken():
    adapter = ADAPTERS["mixtral"]
    assert read(adapter, {"norm_topk_prob": True, "foo": None, "_private": 1}) == read(adapter, {})
    assert read(adapter, {"num_experts": 4}) == read(adapter, {"num_local_experts": 4})
