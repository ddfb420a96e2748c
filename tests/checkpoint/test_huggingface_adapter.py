"""Any model goes to Hugging Face's form and back by its spec's adapter, and is refused by name without one."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from models.toy import RUN, SYNTHETIC, ConvConfig, ConvNet, ConvSpec, config_of
from run_files import snapshot
from torch import Tensor

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.config import load
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.models.model import Model
from gptlite.satellites.checkpoint_tool.huggingface import export, import_
from gptlite.satellites.huggingface.adapter import Adapter, Weight
from gptlite.start.pretrain import pretrain
from gptlite.tokenizers.base import NumberTokenizer
from gptlite.trainer.state import model_tensors


class ConvAdapter(Adapter[ConvConfig]):
    """The toy with its filters the other way round, and a bias of the embedding that the toy has not."""

    model_type = "conv"
    model_class = "ConvForCausalLM"
    title = "ConvNet"

    def weights(self, config: ConvConfig) -> Iterator[Weight]:
        assert config.symbols is not None
        table = (config.symbols, config.channels)
        yield Weight("net.embed.weight", table, "table.weight", table)
        yield Weight("net.embed.bias", table[1:], None, table[1:])
        for i in range(config.depth):
            sizes = config.channels, config.channels, config.kernel
            yield Weight(
                f"net.{i}.f", sizes[::-1], f"stack.c{i}.filter.weight", sizes, lambda ours: ours.permute(2, 1, 0)
            )
            yield Weight(f"net.{i}.b", sizes[:1], f"stack.c{i}.filter.bias", sizes[:1])
            yield Weight(f"net.{i}.gain", (), f"stack.c{i}.gain", ())
        yield Weight("mean", table[1:], "mean", table[1:])
        yield Weight("head.weight", table, "out.weight", table)
        yield Weight("head.bias", table[:1], "out.bias", table[:1])

    def canonical(self, name: str) -> str | None:
        return name.removeprefix("net.")

    def to_json(self, config: ConvConfig, torch_dtype: str, eod: int | None) -> dict[str, Any]:
        sizes = {"symbols": config.symbols, "sizes": [config.channels, config.depth, config.kernel]}
        return {"model_type": self.model_type, **sizes, "eos_token_id": eod, "torch_dtype": torch_dtype}

    def from_json(self, content: Mapping[str, Any], name: str) -> ConvConfig:
        return ConvConfig(*content["sizes"], content["symbols"])


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConvSpec, "huggingface", lambda self: (ConvAdapter(),), raising=False)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A checkpoint of the toy whose every tensor is random."""
    config = config_of("run.dir=unused", "model.symbols=61", "model.depth=2")
    generator = torch.Generator().manual_seed(0)
    tensors = tensors_of(config.model)
    for tensor in tensors.values():
        tensor.detach().normal_(generator=generator)
    meta = {"step": 7, "data_identity": {}}
    run = Checkpointer(CheckpointConfig(), tmp_path / "ours")
    return run.save(tensors, meta, to_yaml(config), NumberTokenizer(61), print)


def tensors_of(config: ConvConfig, step: Path | None = None) -> dict[str, Tensor]:
    tensors = model_tensors(Model.of(config), [ConvNet(config)])
    if step is not None:
        load_tensors(step, tensors, strict=False)
    return tensors


def test_a_model_without_an_adapter_is_not_exported(step: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(
        ConfigError, match=f"^{step}: the conv model has no Hugging Face adapter; add `huggingface` to its spec$"
    ):
        export(step, tmp_path / "deep" / "out")
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "deep").exists()


@pytest.mark.usefixtures("adapted")
def test_it_goes_there_and_comes_back(step: Path, tmp_path: Path) -> None:
    said: list[str] = []
    export(step, tmp_path / "out", log=said.append)
    assert said[-1].endswith("for ConvForCausalLM.from_pretrained")
    config = from_yaml(read_config(step)).model
    ours = tensors_of(config, step)
    theirs = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(theirs["net.1.f"], ours["model.stack.c1.filter.weight"].permute(2, 1, 0))
    assert not theirs["net.embed.bias"].any()
    again = import_(tmp_path / "out", tmp_path / "run", plugins=["models.toy"], log=said.append)
    assert from_yaml(read_config(again)).model == config
    back = tensors_of(config, again)
    assert back.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(back[name], ours[name])] == []
    export(again, tmp_path / "twice")
    assert (tmp_path / "twice/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "twice/config.json").read_text())["architectures"] == ["ConvForCausalLM"]

    start = command("train")
    words = shlex.split(said[-1][said[-1].index(start) + len(start) :])
    assert words[2:] == ["plugins=[models.toy]", "model=conv_schema", "model.depth=2", "model.symbols=61"]
    with pytest.raises(ConfigError, match=r"give optimizer\.lr="):  # the model has no learning rate of its own
        load([*words, *SYNTHETIC, "data.sequence_length=32", "run.name=more"])
    rest = [word for word in RUN if not word.startswith("model=")]
    run = load([*words, *SYNTHETIC, *rest, "trainer.max_steps=1", f"run.dir={tmp_path / 'more'}"])
    assert pretrain(run).exit_code == 0
    assert f"weights from {again}" in (tmp_path / "more" / "train.log").read_text()


@pytest.mark.usefixtures("adapted")
def test_what_is_not_quite_it_is_refused(step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(step, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    intact = safetensors.torch.load_file(path)
    for change, words in (
        ({"net.embed.bias": torch.ones(24)}, "net.embed.bias is not zero, but gptlite's model has no such parameter"),
        ({"more": torch.ones(1)}, "more is not a tensor of the ConvNet model of its config.json"),
        ({"embed.weight": torch.ones(61, 24)}, "is also stored as"),
    ):
        safetensors.torch.save_file(intact | change, path)
        with pytest.raises(ConfigError, match=words):
            import_(tmp_path / "out", tmp_path / "run")
    safetensors.torch.save_file(intact, path)
    monkeypatch.setattr(ConvSpec, "vocab_size", lambda self, config: None)
    with pytest.raises(ConfigError, match="conv model has no known vocabulary size; define `vocab_size` in its spec"):
        import_(tmp_path / "out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_model_names_those_that_there_are(step: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ["conv"]}')
    kinds = '"gpt2", "llama", "qwen3", "mistral", "mixtral", "qwen3_moe", "olmoe"'
    with pytest.raises(ConfigError, match=rf'model_type=\["conv"\]: only model_type={kinds} can'):
        import_(tmp_path, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"plugins=\[nowhere\]: no module"):
        import_(tmp_path, tmp_path / "run", plugins=["nowhere"])
