"""Optional capabilities of a spec: defined by its methods alone, asked for, required, and their defaults."""

from collections.abc import Iterator
from typing import Any

import pytest
from models.toy import ConvConfig, ConvSpec

from gptlite.errors import ConfigError
from gptlite.models.base import BaseSpec
from gptlite.models.capabilities import BatchNorms, MuonMatrices, PlainModule, TextGeneration, capability, required
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.spec import GPTSpec
from gptlite.models.model import Model
from gptlite.models.scores import TargetScores, scores
from gptlite.models.spec import Matrices
from gptlite.satellites.plan.parameters import PlannerFacts, repeats


class Plugin(ConvSpec):
    """Extends ModelSpec alone, as plug-ins of earlier versions do."""

    writes_text = True

    def generate(self, *arguments: Any, stop: int | None, cache: bool) -> Iterator[int]:
        yield 3

    def scores(self, part: Any, x: Any, inputs: Any) -> Any:
        return "scored"

    def matrices(self, config: ConvConfig) -> Matrices:
        return Matrices(edges=("out.weight",))

    def equal_blocks(self, config: ConvConfig) -> bool:
        return False


def test_a_spec_has_the_capabilities_whose_methods_it_defines():
    for kind in (TextGeneration, TargetScores, MuonMatrices, PlannerFacts):
        assert capability(GPTSpec(), kind) is not None
        plugin, plain = Plugin(), ConvSpec()
        assert capability(plugin, kind) is plugin
        assert capability(plain, kind) is None


def test_only_models_of_plug_ins_are_plain_modules():
    for kind in (PlainModule, BatchNorms):
        assert capability(ConvSpec(), kind) is not None
        assert capability(GPTSpec(), kind) is None


def test_a_missing_capability_names_the_model_and_the_method():
    words = r"^checkpoint=a: the conv model has no text generation; define `generate` in its spec$"
    with pytest.raises(ConfigError, match=words):
        required(ConvSpec(), TextGeneration, "checkpoint=a")
    plugin = Plugin()
    assert required(plugin, TextGeneration, "checkpoint=a") is plugin


def test_a_model_uses_them_and_has_defaults_without():
    config: Any = ConvConfig(symbols=7)
    assert Model(Plugin(), config).matrices() == Matrices(edges=("out.weight",))
    assert Model(ConvSpec(), config).matrices() == Matrices(embeddings=("table.weight",))
    nothing: Any = None
    assert scores(Model(Plugin(), config), nothing, nothing, nothing) == "scored"
    with pytest.raises(ConfigError, match="ConvSpec overrides `forward`; define its `scores` too"):
        scores(Model(ConvSpec(), config), nothing, nothing, nothing)


def test_the_planner_profiles_every_block_that_differs(monkeypatch: pytest.MonkeyPatch):
    assert repeats(ConvConfig(symbols=7))
    monkeypatch.setattr(ConvSpec, "equal_blocks", Plugin.equal_blocks, raising=False)
    assert not repeats(ConvConfig(symbols=7))
    assert repeats(GPTConfig(vocab_size=7))
    assert not repeats(GPTConfig(vocab_size=7, value_residual=True))


def test_the_interface_of_every_model_is_small():
    """A reader of the engine knows these; whatever only some models can do is a capability."""
    methods = [name for name, each in vars(BaseSpec).items() if callable(each) and not name.startswith("_")]
    assert len(methods) <= 16
