"""Adapters of each model: the built-in ones, and those of plug-ins' specs."""

from collections.abc import Sequence
from typing import Any, Protocol

from gptlite.models.base import BaseSpec
from gptlite.models.capabilities import capability
from gptlite.models.gpt.spec import GPTSpec
from gptlite.models.registry import SPECS
from gptlite.satellites.huggingface.adapter import Adapter
from gptlite.satellites.huggingface.gpt2 import GPT2
from gptlite.satellites.huggingface.llama import Llama, Mistral, Qwen3
from gptlite.satellites.huggingface.moe import Mixtral, OLMoE, Qwen3MoE

BUILT_IN: dict[type[BaseSpec], tuple[Adapter[Any], ...]] = {
    GPTSpec: (GPT2(), Llama(), Qwen3(), Mistral(), Mixtral(), Qwen3MoE(), OLMoE())
}


class HuggingFaceModel(Protocol):
    """Capability of a spec: conversion to and from classes of Hugging Face's transformers."""

    def huggingface(self) -> Sequence[Adapter[Any]]:
        """Return the adapters to these classes. Without any, those of the spec that this one extends are used."""
        ...


def adapters_of(spec: BaseSpec) -> tuple[Adapter[Any], ...]:
    """Return the adapters that a spec gives; otherwise, the built-in ones of its class or of the nearest base class."""
    built_in = (BUILT_IN[each] for each in type(spec).__mro__ if each in BUILT_IN)
    own = capability(spec, HuggingFaceModel)
    return tuple(own.huggingface() if own else ()) or next(built_in, ())


def all_adapters() -> list[Adapter[Any]]:
    """Return the adapters of all registered models."""
    return [adapter for spec in SPECS for adapter in adapters_of(spec)]
