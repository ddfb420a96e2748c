"""Configurations that parallelism.deterministic refuses, and rows of the key elsewhere."""

import pytest
import torch
from distributed.cells.layouts import BASE
from torch import nn

from gptlite.checkpoint.compare import Effect, effect_of
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.models.model import Model
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Precision
from gptlite.satellites.deterministic.build import build_reduction
from gptlite.satellites.deterministic.words import deterministic_words

ON = "parallelism.deterministic=true"
UNTIED = "model.tied_embeddings=false"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("parallelism=auto", "parallelism.auto=true"),
        ("parallelism.tensor=2", "parallelism.tensor=2"),
        ("parallelism.context=2", "parallelism.context=2"),
        ("parallelism.expert=2 parallelism.data=2 model.moe.experts=4", "parallelism.expert=2"),
        (f"parallelism.pipeline=2 parallelism.schedule=zbv {UNTIED}", "parallelism.schedule=zbv"),
        ("parallelism.pipeline=2", "a tied parameter"),
        ("parallelism.zero=3 parallelism.offload=nvme parallelism.offload_path=/tmp", "parallelism.offload=nvme"),
        ("parallelism.data=2 parallelism.compression=int8", "parallelism.compression=int8"),
        ("parallelism.data=2 parallelism.zero=3 parallelism.zeropp.weights=int8", "parallelism.zeropp.weights=int8"),
        ("precision=bf16", "precision=bf16"),
        ("precision=fp16", "precision=fp16"),
        ("optimizer=lamb", "optimizer=lamb"),
        ("parallelism.data=2 optimizer=onebit_adam", "optimizer=onebit_adam"),
        ("trainer.compile=true", "trainer.compile=true"),
        ("trainer.noise_scale=true data.micro_batch_size=4", "trainer.noise_scale=true"),
        ("optimizer=sgd optimizer.adascale=true data.micro_batch_size=4", "optimizer.adascale=true"),
        ("data.global_batch_size=1048577", "data.global_batch_size=1048577"),
    ],
)
def test_refusals_name_the_keys(words: str, names: str):
    with pytest.raises(ConfigError) as caught:
        load([*BASE, "precision=fp32", ON, *words.split()])
    message = str(caught.value)
    assert message.startswith(f"{ON} with ")
    assert names in message
    assert message.endswith("parallelism.deterministic=false")
    assert "\n" not in message
    load([*BASE, "precision=fp32", *words.split(), "parallelism.deterministic=false"])


def test_a_schedule_that_cannot_divide_the_samples_is_refused():
    words = ["parallelism.pipeline=4", "parallelism.data=1", "parallelism.schedule=interleaved_1f1b", UNTIED]
    words += ["data.global_batch_size=14", "parallelism.virtual_stages=2"]
    load([*BASE, *words, "data.micro_batch_size=2"])
    with pytest.raises(ConfigError, match=r"data.micro_batch_size=1 x accumulation=14"):
        load([*BASE, *words, "data.micro_batch_size=2", ON])


@pytest.mark.parametrize("words", ["optimizer=muon", "optimizer=lion", "parallelism.zero=3 parallelism.offload=cpu"])
def test_what_has_equal_bits_is_not_refused(words: str):
    assert load([*BASE, "precision=fp32", ON, *words.split()]).parallelism.deterministic


def test_a_precision_that_the_device_chooses_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    config, mesh = load([*BASE, "precision=auto", ON]), Mesh(torch.device("cpu"))
    from gptlite.satellites.deterministic import build

    resolve = build.resolve_precision
    for dtype, name in ((Precision.bf16, "bf16"), (Precision.fp32, "")):

        def chosen(section, device, dtype=dtype):
            section.dtype = dtype
            return resolve(section, device)

        monkeypatch.setattr(build, "resolve_precision", chosen)
        if not name:
            build_reduction(config, mesh)
            continue
        with pytest.raises(ConfigError, match="here bf16"):
            build_reduction(config, mesh)


class Spec:
    name, keyed_dropout = "mine", False


@pytest.mark.parametrize(
    ("layer", "why"),
    [(nn.BatchNorm1d(2), "averages over the samples"), (nn.Dropout(0.1), "the masks of 1"), (nn.Dropout(0.0), "")],
)
def test_models_that_mix_samples_are_refused(layer: nn.Module, why: str, monkeypatch: pytest.MonkeyPatch):
    from gptlite.satellites.deterministic import build

    model = Model(Spec(), None)  # type: ignore[arg-type]
    monkeypatch.setattr(Model, "build", lambda *_: nn.Sequential(nn.Linear(2, 2), layer))
    if not why:
        build._refuse_dependence(model)
        return
    with pytest.raises(ConfigError, match=why):
        build._refuse_dependence(model)


def test_the_key_changes_numbers_and_adds_a_line():
    assert effect_of("parallelism.deterministic") is Effect.changes_numbers
    assert deterministic_words(ParallelismConfig()) == ""
    assert "docs/deterministic.md" in deterministic_words(ParallelismConfig(deterministic=True))
