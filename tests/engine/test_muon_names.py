"""Muon in `gptlite.initialize` and plug-ins: the matrices that it leaves to AdamW, and losses of DeepSpeed's Muon."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite import ConfigError, initialize, load
from gptlite.models.model import Model
from gptlite.models.spec import Matrices
from gptlite.ops.select import Ops
from gptlite.optimizer.config import MuonConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import resolve_precision
from gptlite.satellites.plan.parameters import inventory
from gptlite.trainer.parts import build_updates

FP32 = "precision=fp32"


class Net(nn.Module):
    """An embedding, three linear layers with a residual stream, and a head, with the given names."""

    def __init__(self, embedding: str = "table", head: str = "lm_head", tied: bool = False) -> None:
        super().__init__()
        self.names = embedding, head
        self.add_module(embedding, nn.Embedding(16, 8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 12), nn.Linear(12, 8)])
        self.add_module(head, nn.Linear(8, 16))
        if tied:
            self.get_submodule(head).weight = self.get_submodule(embedding).weight

    def forward(self, x: Tensor) -> Tensor:
        embedding, head = map(self.get_submodule, self.names)
        first, up, down = self.blocks
        x = embedding(x).mean(1)
        x = x + first(x).relu()
        return head(x + down(up(x).relu()))


def orthogonalized(module: nn.Module, *config: str) -> list[str]:
    """Names of the parameters that Muon itself updates."""
    with initialize(module, "muon", [*config, FP32]) as engine:
        groups = engine._state.optimizer.param_groups
        return [name for group in groups if group["muon"] for name in group["names"]]


BLOCKS = [f"blocks.{index}.weight" for index in range(3)]


def test_adamw_updates_embeddings_by_type_and_parameters_by_name():
    assert orthogonalized(Net()) == BLOCKS
    assert orthogonalized(Net("wte", "lm_head")) == BLOCKS
    assert orthogonalized(Net("wte", "lm_head", tied=True)) == BLOCKS
    assert orthogonalized(Net("wte", "classifier")) == [*BLOCKS, "classifier.weight"]
    assert orthogonalized(Net("wte", "Classifier"), "optimizer.adamw_names=[classifier]") == BLOCKS
    assert orthogonalized(Net(), "optimizer.adamw_names=[s.0,s.1]") == [BLOCKS[2], "lm_head.weight"]
    before = "optimizer.adamw_names=null"  # the rule before this key
    assert orthogonalized(Net(), before) == ["table.weight", *BLOCKS, "lm_head.weight"]
    bag = nn.Sequential(nn.EmbeddingBag(16, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    assert orthogonalized(bag) == ["1.weight", "2.weight"]
    with pytest.raises(ConfigError, match=r"optimizer\.adamw_names=.* has an empty word"):
        orthogonalized(Net(), "optimizer.adamw_names=['']")


@pytest.mark.parametrize("names", ["[]", "null"])
def test_a_plug_in_follows_the_same_rule_and_the_planner_knows_it(names: str):
    import models.toy  # noqa: F401

    overrides = ["plugins=[models.toy]", "model=conv", "optimizer=muon", "optimizer.lr=0.1", "model.symbols=7"]
    config = load([*overrides, f"optimizer.adamw_names={names}", FP32, "data.sequence_length=8"])
    mesh = Mesh(torch.device("cpu"))
    policy = resolve_precision(config.precision, mesh.device)
    model = Model.of(config.model, policy)
    part = model.build(Ops(), 0)
    assert isinstance(config.optimizer, MuonConfig)
    optimizer = build_updates(config.optimizer, model, [part], policy, Ops())
    found = [name for group in optimizer.param_groups if group["muon"] for name in group["names"]]
    assert ("table.weight" in found) is (names == "null")
    assert "out.weight" in found
    assert model.matrices() == Matrices(embeddings=("table.weight",))
    flags = [each.embedding for each in inventory(config.model, 1).others[True, True]]
    assert flags == [True, False, False]  # table.weight, out.weight, out.bias


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randint(16, (8, 5), generator=random), torch.randint(16, (8,), generator=random)) for _ in range(steps)
    ]


def test_losses_are_those_of_deepspeeds_muon(tmp_path: Path):
    """DeepSpeed 0.19.8, stage 0, one rank on a CPU, fp32, on this module, data and JSON."""
    expected = [2.839539, 2.562215, 2.866655, 3.179192, 2.706707, 2.921724, 2.736775, 3.038869]
    params = {"muon_lr": 0.02, "adam_lr": 0.003}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_clipping": 1.0, "optimizer": {"type": "Muon", "params": params}}))
    torch.manual_seed(0)
    with initialize(Net("embed", "lm_head"), config=[f"deepspeed={file}"], loss=F.cross_entropy) as engine:
        assert [engine.step(batch).loss for batch in data(8)] == pytest.approx(expected, abs=3e-6)


def test_a_checkpoint_from_before_the_key_names_it_and_loads_with_null(tmp_path: Path):
    before = [FP32, f"run.dir={tmp_path}", "optimizer.adamw_names=null"]
    with initialize(Net(), "muon", before) as engine:
        engine.step(data(1)[0])
        engine.save()
    with (
        initialize(Net(), "muon", [FP32, f"run.dir={tmp_path}"]) as engine,
        pytest.raises(ConfigError, match=r"optim\.table\.weight\..* is absent there.*; set optimizer\.adamw_names as"),
    ):
        engine.load()
    with initialize(Net(), "muon", before) as engine:
        assert engine.load().step == 1
