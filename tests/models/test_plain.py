"""Defaults of ModelSpec for a plain nn.Module, and data that a plugin defines: what is taken, and what is refused."""

import pickle
import re
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from distributed.cells.run import Ranks
from models.example_runs import config_of as example_config
from models.example_runs import curve
from models.example_runs import train as train_example
from models.resnet import config_of, train
from run_files import checkpoint, read_metrics
from torch import nn

from examples.resnet import CifarConfig, ResNetConfig, ResNetSpec, open_cifar
from gptlite.config import load
from gptlite.data import registry
from gptlite.data.build import build_loader, open_data
from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.errors import ConfigError
from gptlite.models.batch_norm import SyncedBatchNorm, sync_batch_norms
from gptlite.models.capabilities import BatchNorms, required
from gptlite.models.config import ModelConfig
from gptlite.models.model import Model
from gptlite.models.parallelize import materialize, parallelize
from gptlite.models.plain import blocks_of, call, has_end, keep_blocks
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec
from gptlite.ops.inputs import Inputs
from gptlite.ops.select import Ops
from gptlite.parallelism.config import ActivationCheckpointing, ParallelismConfig
from gptlite.parallelism.mesh import build_mesh
from gptlite.precision import Policy
from gptlite.satellites.samples.dataset import SampleLoader, open_samples
from gptlite.trainer.build import build_run


@dataclass
class TiedConfig(ModelConfig):
    width: int = 16


def test_resnet18_has_the_published_number_of_parameters():
    with torch.device("meta"):
        part = ResNetSpec().build(ResNetConfig(), Ops(), 0)
    assert sum(p.numel() for p in part.parameters()) == 11_181_642


def test_blocks_are_children_of_a_sequential_or_the_elements_of_module_lists():
    whole = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    assert list(blocks_of(whole)) == [0, 1, 2]
    keep_blocks(whole, range(1, 3))
    assert list(blocks_of(whole)) == [1, 2]
    assert [name for name, _ in whole.named_parameters()] == ["2.weight", "2.bias"]
    assert has_end(whole)
    keep_blocks(whole, range(1, 2))
    assert not has_end(whole)
    tree = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(1, 1)] * 2), "b": nn.ModuleList([nn.ModuleList([nn.ReLU()])])})
    assert len(blocks_of(tree)) == 3


class TiedSpec(ModelSpec):
    """An autoencoder whose blocks share a weight."""

    name, schema, reads = "tied", TiedConfig, "samples"

    def build(self, config, ops, seed):
        whole = nn.Sequential(nn.Flatten(), nn.Linear(784, 16, bias=False), nn.Linear(16, 16), Transposed())
        whole[3].weight = whole[1].weight
        return whole


class Transposed(nn.Module):
    """Product with the transpose of a weight that another module owns."""

    weight: nn.Parameter

    def forward(self, x):
        return (x @ self.weight)[:, :10]


register_model(TiedSpec())
TIED = ("model=tied", "optimizer.lr=1e-3")


def test_weights_that_blocks_share_stay_one(tmp_path):
    """On any number of ranks; ZeRO gathers such blocks with the rest of the model."""
    assert Model(TiedSpec(), TiedConfig()).tied == {"3.weight": "1.weight"}
    assert train_example("mlp", str(tmp_path / "one"), *TIED, "data.micro_batch_size=8") == 0
    with Ranks(2) as two:
        words = (*TIED, "parallelism=zero3", "parallelism.data=2", "data.micro_batch_size=4")
        assert two.run("models.test_plain:train_example", "mlp", str(tmp_path / "two"), *words) == [0, 0]
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=2e-5)
    tensors, _ = checkpoint(tmp_path / "two", 3)
    assert {key for key in tensors if key.startswith("model.")} == {"model.1.weight", "model.2.weight", "model.2.bias"}
    with pytest.raises(ConfigError, match=r"the tied model ties 3\.weight to 1\.weight, which stages cannot share"):
        example_config("mlp", *TIED, "parallelism.pipeline=2")


def test_a_module_is_called_with_a_tensor_a_tuple_or_a_dict():
    class Add(nn.Module):
        def forward(self, a, b=1):
            return a + b

    assert call(Add(), 2) == 3
    assert call(Add(), (2, 3)) == 5
    assert call(Add(), {"a": 2, "b": 5}) == 7


def test_batch_norm_equals_torchs():
    torch.manual_seed(0)
    theirs, ours = nn.Sequential(nn.BatchNorm2d(3)), nn.Sequential(nn.BatchNorm2d(3))
    sync_batch_norms(ours, build_mesh(ParallelismConfig()))
    assert isinstance(ours[0], SyncedBatchNorm)
    x = torch.randn(4, 3, 5, 5) * 3 + 100
    found = []
    for norm in (theirs, ours):
        norm.train()
        leaf = x.clone().requires_grad_()
        (norm(leaf) ** 3).sum().backward()
        found.append([leaf.grad, norm[0].weight.grad, *norm[0].buffers(), norm.eval()(x)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-4, atol=2e-4)


class NormedSpec(ModelSpec):
    name, schema, reads = "normed", TiedConfig, "samples"

    def build(self, config, ops, seed):
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3))


@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_batch_norms_are_replaced_and_track_a_pass_once(mode):
    """A block that is recomputed in the backward pass has already updated the running statistics."""
    model, mesh = Model(NormedSpec(), TiedConfig()), build_mesh(ParallelismConfig())
    config, policy = ParallelismConfig(activation_checkpointing=mode), Policy(torch.float32, "test")
    (part,) = parallelize(model, model.build(Ops(), 0), mesh, config, policy)
    materialize(model, [part], torch.device("cpu"))
    model.fill_buffers(part, Ops(), 0)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 10)
    block, x = part.get_submodule("0"), torch.arange(24.0).view(6, 4)
    norm = block.get_submodule("1")
    assert isinstance(norm, SyncedBatchNorm)
    assert required(model.spec, BatchNorms, "").has_batch_norm(part)
    model.forward(part.train(), x, Inputs(torch.zeros(6, dtype=torch.int64))).backward()
    assert norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, block.get_submodule("0")(x).mean(0) * norm.momentum)


class Points:
    """Samples (x, class); `fault` decides what is wrong with them."""

    def __init__(self, fault: str, count: int = 12) -> None:
        self.fault, self.count = fault, count

    def __len__(self) -> int:
        return 0 if self.fault == "empty" else self.count

    def __getitem__(self, index: int):
        if self.fault == "raises" and index == 3:
            raise KeyError("no such file")
        x = torch.full((4,), float(index))
        if self.fault == "random":
            return x + torch.rand(4) + float(np.random.rand()), index % 3
        if self.fault == "ragged":
            return torch.ones(index + 1), 0
        return {"text": ("words", 0), "alone": x, "keys": {"x": x}}.get(self.fault, (x, index % 3))


@dataclass
class PointsConfig(DatasetConfig):
    global_batch_size: int = 4
    fault: str = ""


def open_points(config: PointsConfig):
    if config.fault == "missing":
        raise FileNotFoundError("no folder")
    if config.fault == "iterable":
        return iter([]), iter([])
    return Points(config.fault), {"seen": Points(config.fault), "new": Points(config.fault, 5)}


register_data("points", PointsConfig, open_points)


@pytest.mark.parametrize(
    ("fault", "refusal"),
    [
        ("missing", "data=points: opening it raised FileNotFoundError: no folder"),
        ("iterable", "data=points: the training dataset, list_iterator, lacks __getitem__ or __len__"),
        ("empty", "data=points: the training dataset has length 0; it needs at least one sample"),
        ("text", "data=points: a sample contains str 'words'; return tensors or numbers"),
        ("alone", "data=points: a sample is Tensor; return (input, target) or a dict of tensors"),
        ("keys", "data=points: a sample has the keys x, but none of labels, label, targets, target"),
    ],
)
def test_a_wrong_dataset_is_one_line(fault, refusal):
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        open_samples(PointsConfig(fault=fault))


def loader_of(tmp_path, *overrides: str) -> SampleLoader:
    words = ("data=points", "data.micro_batch_size=2", f"run.dir={tmp_path}", *overrides)
    mesh = build_mesh(ParallelismConfig())
    config = load(["model=resnet18", "run.name=points", *words])
    loader = build_loader(config.data, open_data(config.data, config.seed, print, mesh), mesh, config.seed)
    assert isinstance(loader, SampleLoader)
    return loader


def steps(loader: SampleLoader, *consumed: int) -> list[torch.Tensor]:
    return [loader.batch(at, micro).tokens for at in consumed for micro in range(2)]


@pytest.mark.parametrize("fault", ["raises", "ragged"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_sample_is_one_line(tmp_path, fault, workers):
    loader = loader_of(tmp_path, f"data.fault={fault}", f"data.workers={workers}")
    words = {"raises": "sample 3 raised KeyError: 'no such file'", "ragged": "samples cannot be collated"}[fault]
    with pytest.raises(ConfigError, match=f"data=points: {words}") as refused:
        steps(loader, 0, 4, 8)
    assert "\n" not in str(refused.value)
    loader.close()


def test_workers_drop_what_they_have_read_ahead_when_the_batch_grows(tmp_path):
    words = "data.fault=random", "data.global_batch_size=4", "data.batch_ramp=[2,2]", "trainer.noise_scale=true"
    here, there = loader_of(tmp_path, *words), loader_of(tmp_path, *words, "data.workers=2")
    position, read = 0, []
    for step in range(5):
        if step == 2:  # decided after the step before, for the next but one
            for loader in (here, there):
                loader.schedule = replace(loader.schedule, grown=((6, 4),))
        for micro in range(here.micro_batches(position)):
            a, b = here.batch(position, micro), there.batch(position, micro)
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.sample_ids, b.sample_ids)
            read += b.sample_ids.tolist()
        position = here.schedule.after(position)
    assert read == list(range(3 * 2 + 2 * 4))
    there.close()


def test_samples_and_their_augmentation_are_a_function_of_seed_and_number(tmp_path):
    here, there = loader_of(tmp_path, "data.fault=random"), loader_of(tmp_path, "data.fault=random", "data.workers=2")
    before = torch.get_rng_state()
    first = steps(here, 0, 4, 8, 12)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    for a, b in zip(first, steps(there, 0, 4, 8, 12), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first[4:], steps(there, 8, 12), strict=True):  # as after a rewind
        assert torch.equal(a, b)
    drawn = torch.cat(first[:6])[:, 0].floor()
    assert len(drawn) == 12
    assert not torch.equal(torch.cat(steps(here, 0)), torch.cat(steps(here, 12)))  # the next epoch's own draw
    there.close()


def test_validation_reads_each_sample_once(tmp_path):
    loader = loader_of(tmp_path)
    assert loader.validation_sets == ["seen", "new"]
    found = [batch.tokens[:, 0].tolist() for batch in loader.validation_batches(name="new")]
    assert found == [[0, 1], [2, 3], [4]]
    assert loader.num_validation_batches(name="new") == 3


class Bad(ModelSpec):
    """A linear model with a fault."""

    name, schema, fault = "bad", ResNetConfig, ""

    def build(self, config, ops, seed):
        layers = [nn.Conv1d(4, 3, 1) if self.fault == "double" else nn.Linear(5 if self.fault == "width" else 4, 3)]
        return layers if self.fault == "list" else nn.Sequential(*layers)

    def loss(self, out, inputs):
        return out.sum(1) if self.fault == "loss" else super().loss(out, inputs)


@pytest.mark.parametrize(
    ("fault", "refusal"),
    [
        ("width", "the bad model, given float32 [2, 4] and targets int64 [2]: RuntimeError"),
        ("loss", "the loss is float32 [2]; return a scalar tensor"),
        ("list", "the bad model: `build` returns list; return an nn.Module"),
        ("double", "should be the same; return float32 samples"),
        ("", None),
    ],
)
def test_a_wrong_model_is_refused_by_a_pass_without_values(fault, refusal):
    spec = Bad()
    spec.fault = fault
    model, targets = Model(spec, ResNetConfig()), torch.zeros(2, dtype=torch.int64)
    x = torch.zeros(2, 4, 1, dtype=torch.float64) if fault == "double" else torch.zeros(2, 4)
    if refusal is None:
        model.check_pass(x, targets)
        return
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        model.check_pass(x, targets)


def test_what_an_opened_dataset_has_to_be(monkeypatch):
    wrong: Any = lambda config: {"train": 1}  # noqa: E731
    monkeypatch.setitem(registry.SOURCES, "points", registry.DataSource("points", PointsConfig, wrong))
    with pytest.raises(ConfigError, match=r"data=points: opening it returned dict; return \(training, validation\)"):
        open_samples(PointsConfig())


def test_targets_that_are_no_classes_need_a_loss():
    with pytest.raises(TypeError, match=r"Bad\.loss: cross entropy needs logits .* or define `loss` in the spec"):
        Bad().forward(nn.Sequential(nn.Linear(4, 3)), torch.zeros(2, 4), Inputs(torch.zeros(2)))


def test_the_number_of_losses_may_be_a_number(tmp_path, monkeypatch):
    assert train_example("mlp", str(tmp_path / "tensor")) == 0
    spec = import_module("examples.mlp").MLPSpec
    monkeypatch.setattr(spec, "count", lambda self, targets: len(targets), raising=False)
    assert train_example("mlp", str(tmp_path / "number")) == 0
    assert curve(tmp_path / "number") == curve(tmp_path / "tensor")
    monkeypatch.setattr(spec, "count", lambda self, targets: 2 * len(targets))
    assert train_example("mlp", str(tmp_path / "twice")) == 0
    assert curve(tmp_path / "twice")[0] == pytest.approx(curve(tmp_path / "number")[0] / 2)


def test_models_and_data_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="the resnet18 model reads samples, but data=synthetic has tokens"):
        load(["model=resnet18", "data=synthetic", "data.sequence_length=4", "run.name=mixed"])
    with pytest.raises(ConfigError, match="the resnet18 model reads samples, but data=shakespeare has tokens"):
        load(["model=resnet18", "data.sequence_length=4", "run.name=mixed"])
    with pytest.raises(ConfigError, match="the gpt model reads tokens, but data=points has samples"):
        load(["model=gpt-lite", "data=points", "run.name=mixed"])
    with pytest.raises(
        ConfigError,
        match="10 stages, and every stage needs at least one block, but the resnet18 model's number of blocks=6",
    ):
        config_of("parallelism.pipeline=10")
    with pytest.raises(ConfigError, match="does not extend"):
        register_data("other", ResNetConfig, open_points)  # type: ignore[arg-type]


def test_a_name_in_use_is_refused():
    @dataclass
    class PointsAgain(DatasetConfig):
        pass

    with pytest.raises(ConfigError, match="a dataset named points is already registered"):
        register_data("points", PointsAgain, open_points)
    assert registry.SOURCES["points"].schema is PointsConfig


def test_a_dataclass_identifies_one_model_or_dataset():
    """A second one would be trained as the first."""

    class Again(ModelSpec):
        name, schema = "again", ResNetConfig

    with pytest.raises(ConfigError, match="model=again: ResNetConfig is the schema of model=resnet18; define a"):
        register_model(Again())
    with pytest.raises(ConfigError, match="data=again: PointsConfig is the schema of data=points; define a"):
        register_data("again", PointsConfig, open_points)


def test_a_target_without_a_class_is_named():
    spec = TiedSpec()
    with pytest.raises(ConfigError, match="the tied model has 3 classes, with indices from 0, but the data"):
        ModelSpec.loss(spec, torch.zeros(2, 3), Inputs(torch.tensor([0, 3])))


def write_cifar(folder, content) -> None:
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def test_cifar_is_read_in_its_published_format(tmp_path):
    pixels = np.arange(2 * 3072, dtype=np.uint64).astype(np.uint8).reshape(2, 3072)
    write_cifar(tmp_path, {b"data": pixels, b"labels": [3, 9], b"batch_label": b"x"})
    train_set, test = open_cifar(CifarConfig(path=str(tmp_path), augment=False))
    assert (len(train_set), len(test)) == (10, 2)
    image, label = test[1]
    assert label == 9
    assert image.shape == (3, 32, 32)
    assert image[0, 0, 1] == pytest.approx(pixels[1, 1] / 127.5 - 1)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    write_cifar(tmp_path, {b"data": Evil(), b"labels": [0]})
    with pytest.raises(ConfigError, match=r"data_batch_1 cannot be read \(it refers to .*print.*, which is not"):
        open_cifar(CifarConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"data_batch_1 cannot be read \(No such file or directory\)"):
        open_cifar(CifarConfig(path=str(tmp_path / "none")))


def test_a_resumed_run_draws_the_dropout_of_an_uninterrupted_one(tmp_path, monkeypatch):
    def build(self, config, ops, seed):
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3072, 10))

    monkeypatch.setattr(ResNetSpec, "build", build)
    assert train(str(tmp_path / "whole")) == 0
    assert train(str(tmp_path / "half"), "trainer.stop_step=2") == 0
    assert train(str(tmp_path / "half"), "trainer.stop_step=null") == 0
    whole, half = ([row["loss"] for row in read_metrics(tmp_path / f) if "loss" in row] for f in ("whole", "half"))
    assert whole == half
    run = build_run(config_of(f"run.dir={tmp_path}"), build_mesh(ParallelismConfig()), lambda _: None)
    assert not run.state.model.spec.keyed_dropout
