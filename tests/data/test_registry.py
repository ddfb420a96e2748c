"""Kinds of data: what is not registered, or registered twice, is refused by its name."""

from dataclasses import dataclass
from typing import Any

import pytest

from gptlite.data import registry
from gptlite.data.build import prepare
from gptlite.data.config import DataConfig
from gptlite.data.registry import DataKind, kind_of, register_kind
from gptlite.errors import ConfigError
from gptlite.satellites.corpus.config import TextConfig

NOTHING: Any = None


@dataclass
class OtherConfig(DataConfig):
    pass


@dataclass
class LongerTextConfig(TextConfig):
    pass


def kind(schema: type[DataConfig], opened: Any = None) -> DataKind:
    return DataKind(schema, lambda config: None, lambda *arguments: opened)


def test_a_subclass_has_the_kind_of_its_base():
    assert kind_of(LongerTextConfig()) is kind_of(TextConfig())


def test_what_is_not_registered_is_named():
    with pytest.raises(ConfigError, match="no kind of data is registered for OtherConfig"):
        kind_of(OtherConfig())
    with pytest.raises(ConfigError, match="no data source is set"):
        kind_of(DataConfig())


def test_the_name_of_a_kind_is_its_own(monkeypatch):
    monkeypatch.setattr(registry, "SCHEMAS", dict(registry.SCHEMAS))
    register_kind(kind_of(TextConfig()), "text")  # a second time has no effect
    with pytest.raises(
        ConfigError, match=r"data=text comes with gptlite, but is registered by gptlite\.satellites\.corpus"
    ):
        register_kind(kind(OtherConfig), "text")


def test_only_tokens_are_prepared(monkeypatch):
    monkeypatch.setattr(registry, "KINDS", {OtherConfig: kind(OtherConfig, opened=object())})
    with pytest.raises(ConfigError, match="text or tokens are needed"):
        prepare(OtherConfig(), 0)
