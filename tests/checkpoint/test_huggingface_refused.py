"""What is not quite a GPT-2 of Hugging Face's is refused in one line, and nothing is written."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint.destruction.hostile import Call, torch_file
from checkpoint.huggingface_models import theirs
from run_files import snapshot
from torch import Tensor

from gptlite.errors import ConfigError
from gptlite.satellites.checkpoint_tool.huggingface import import_


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 that transformers has saved."""
    return theirs(tmp_path_factory.mktemp("saved"), bos_token_id=0, eos_token_id=0)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(saved, tmp_path / "theirs"))


# What a folder may have wrong, and the words that must name it.
CONFIGS = {
    "model_type": ({"model_type": "bert"}, 'model_type="bert": only model_type="gpt2", "llama", "qwen3"'),
    "no model_type": ({"model_type": None}, "model_type=null"),
    "activation": ({"activation_function": "gelu_nwe"}, 'activation_function="gelu_nwe" is not one of'),
    "inverse layer": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
    "unscaled": ({"scale_attn_weights": False}, "scale_attn_weights=false"),
    "cross": ({"add_cross_attention": True}, "add_cross_attention=true"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config="),
    "heads": ({"n_head": 5}, "n_embd=24 is not divisible by n_head=5"),
    "no size": ({"n_layer": None}, "n_layer=null must be a whole number"),
    "negative": ({"n_positions": -3}, "n_positions=-3 must be a whole number"),
    "true": ({"vocab_size": True}, "vocab_size=true must be a whole number"),
    "epsilon": ({"layer_norm_epsilon": "small"}, 'layer_norm_epsilon="small" must be a finite number'),
    "dropout": ({"attn_pdrop": 1.5}, "attn_pdrop=1.5 must be a finite number"),
    "tied": ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings="yes" must be true or false'),
    "more layers": ({"n_layer": 3}, "h.2.ln_1.weight is missing"),
    "fewer layers": ({"n_layer": 1}, "h.1.attn.c_attn.bias is not a tensor of the GPT-2 model of its config.json"),
    "width": ({"n_inner": 48}, "h.0.mlp.c_fc.weight has shape [24, 96], but config.json requires [24, 48]"),
    "rows": ({"vocab_size": 52}, "wte.weight has shape [53, 24], but config.json requires [52, 24]"),
    "untied": ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
}


def refused(folder: Path, run: Path, words: str) -> None:
    before = snapshot(folder.parent)
    with pytest.raises(ConfigError) as refusal:
        import_(folder, run)
    assert words in str(refusal.value)
    assert "weights_only" not in str(refusal.value)  # torch's advice, which would run what is in a file
    assert "\n" not in str(refusal.value)
    assert snapshot(folder.parent) == before


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_something_else_is_refused(folder, tmp_path, name):
    changes, words = CONFIGS[name]
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))
    refused(folder, tmp_path / "run", words)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


W, LN = "transformer.wte.weight", "transformer.h.1.ln_1.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (lambda t: without(t, "transformer.h.1.mlp.c_proj.bias"), "h.1.mlp.c_proj.bias is missing"),
    "too many": (lambda t: t | {"score.weight": t[W].clone()}, "score.weight is not a tensor of the GPT-2"),
    "transposed": (
        lambda t: t | {"transformer.h.0.mlp.c_fc.weight": torch.zeros(96, 24)},
        "h.0.mlp.c_fc.weight has shape [96, 24]",
    ),
    "twice": (lambda t: t | {"wte.weight": t[W].clone()}, "is also stored as"),
    "NaN": (
        lambda t: t | {LN: t[LN].index_fill(0, torch.tensor(3), torch.nan)},
        "h.1.ln_1.weight has 1 NaN or infinite element, the first at [3]",
    ),
    "infinite": (lambda t: t | {W: t[W].index_fill(0, torch.tensor(5), torch.inf)}, "wte.weight has 24 NaN or"),
    "another head": (lambda t: t | {"lm_head.weight": t[W] + 1}, "lm_head.weight differs from wte.weight"),
    "integers": (lambda t: t | {W: t[W].to(torch.int8)}, "wte.weight is torch.int8; save it in float32 first"),
    "doubles": (lambda t: t | {W: t[W].double()}, "wte.weight is torch.float64; save it in float32 first"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_other_tensors_are_refused(folder, tmp_path, name):
    change, words = TENSORS[name]
    path = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path)
    refused(folder, tmp_path / "run", words)


def with_header(path: Path, change: Callable[[bytes], bytes]) -> bytes:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    text = change(content[8:end].rstrip())
    return len(text).to_bytes(8, "little") + text + content[end:]


def another_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    def changed(text: bytes) -> bytes:
        header = json.loads(text)
        found = change(header)
        return json.dumps(found if isinstance(found, list) else header).encode()

    path.write_bytes(with_header(path, changed))


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda p: p.write_bytes(p.read_bytes()[:-5]),
        "model.safetensors is not a safetensors file, or is damaged: ",
    ),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"more"), "does not match its header"),
    "empty": (lambda p: p.write_bytes(b""), "is not a safetensors file"),
    "no header": (lambda p: p.write_bytes(b"\xff" * 100), "it ends within its header"),
    "no object": (lambda p: another_header(p, lambda h: [1]), "is not a safetensors file"),
    "unknown dtype": (lambda p: another_header(p, lambda h: h[W].update(dtype="F4")), f"{W} has the unknown dtype F4"),
    "outside": (
        lambda p: another_header(p, lambda h: h[W].update(data_offsets=[-9, 5079])),
        f"{W}.data_offsets[0] is -9, not 0 or more",
    ),
    "a hole": (
        lambda p: another_header(p, lambda h: h.pop("transformer.wpe.weight") and None),
        f"1536 bytes between transformer.ln_f.weight and {W} are of no tensor",
    ),
    "a hole at the start": (
        lambda p: another_header(p, lambda h: h.pop(min(h, key=lambda each: h[each].get("data_offsets", [1])))),
        "bytes between the header and transformer.h.0.attn.c_attn.weight are of no tensor",
    ),
    "overlapping": (
        lambda p: another_header(p, lambda h: h[LN].update(data_offsets=h["transformer.ln_f.weight"]["data_offsets"])),
        f"the data of {LN} and of transformer.ln_f.weight overlap by 96 bytes",
    ),
    "a name twice": (
        lambda p: p.write_bytes(with_header(p, lambda text: text[:-1] + f',"{LN}":{{}}}}'.encode())),
        f'the key "{LN}" is given twice; remove one',
    ),
    "an offset of another type": (
        lambda p: another_header(p, lambda h: h[W].update(data_offsets=[True, 5088])),
        f"{W}.data_offsets[0] is true, not an integer",
    ),
    "a negative length": (
        lambda p: another_header(p, lambda h: h[W].update(shape=[-53, -24])),
        f"{W}.shape[0] is -53, not 0 or more",
    ),
    "three offsets": (
        lambda p: another_header(p, lambda h: h[W]["data_offsets"].append(9)),
        f"{W}.data_offsets has the length 3, not 2 to 2",
    ),
    "an entry of another type": (lambda p: another_header(p, lambda h: h.update({W: 3})), f"{W} is 3, not an object"),
    "unlike": (
        lambda p: another_header(p, lambda h: h[W].update(shape=[53, 23])),
        f"the shape or the offsets of {W} are invalid",
    ),
    "gone": (Path.unlink, "holds no model.safetensors"),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused(folder, tmp_path, name):
    change, words = FILES[name]
    change(folder / "model.safetensors")
    refused(folder, tmp_path / "run", words)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_runs_nothing(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    attack = Call(Path.touch, folder / "owned")
    contents = {"a call in a state dict": {"wte.weight": attack}, "a list": [torch.zeros(3)], "a 3": {"wte.weight": 3}}
    files = {name: torch_file(content) for name, content in contents.items()}
    for name, content in (files | {"a call": pickle.dumps(attack), "nothing": b"nothing"}).items():
        (folder / "pytorch_model.bin").write_bytes(content)
        read = name in ("a list", "a 3")
        words = "is not a state dict of tensors" if read else "cannot be read as a state dict"
        refused(folder, tmp_path / "run", words)
    assert not (folder / "owned").exists()


def test_an_index_names_files_beside_it(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    for content, words in (
        ({"weight_map": {W: "../outside.safetensors"}}, "is not a file name in the same folder"),
        ({"weight_map": {W: "model-1.safetensors"}}, "model-1.safetensors: No such file or directory; create it"),
        ({"weight_map": [1]}, "has no weight_map"),
        ({}, "has no weight_map"),
        ([], "it is [], not an object"),
    ):
        index.write_text(json.dumps(content))
        refused(folder, tmp_path / "run", words)
    index.write_text("{")
    refused(folder, tmp_path / "run", "is not JSON")
    shutil.copy(tmp_path / "outside.safetensors", folder / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {W: "a.safetensors", "more": "a.safetensors"}}))
    refused(folder, tmp_path / "run", "more is not in a.safetensors")


def test_where_there_is_something_already_nothing_is_written(folder, tmp_path):
    (tmp_path / "run").mkdir()
    import_(folder, tmp_path / "run")  # empty
    refused(folder, tmp_path / "run", "run exists; nothing is overwritten")
    (tmp_path / "file").write_text("mine")
    refused(folder, tmp_path / "file", "file exists; nothing is overwritten")
    refused(tmp_path / "none", tmp_path / "new", "none holds no config.json")
