"""Ranges of the numbers in a configuration, checked before anything else uses them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from gptlite.config.schema import Config
from gptlite.documents import DocumentError, checked
from gptlite.errors import ConfigError
from gptlite.limits import INTEGER, LAYERS, RANKS, SIZE, VOCABULARY
from gptlite.models.registry import spec_of
from gptlite.parallelism.axes import every_axis

SOME, FINITE = sys.float_info.min, sys.float_info.max  # the smallest positive normal float, the largest finite one
AT_LEAST_1, OFF_AT_0 = "must be at least 1", "must not be negative; 0 turns it off"
# Section, keys, minimum, maximum and the end of the error message. An unset key (None) is valid.
BOUNDS: list[tuple[str, str, float, float, str]] = [
    ("", "seed", 0, 2**32 - 1, "must be at least 0 and below 2**32"),
    ("cluster.", "nodes devices_per_node", 1, RANKS, AT_LEAST_1),
    ("cluster.", "exclude_slow", 1.05, FINITE, "must be at least 1.05, the factor at which a node counts as slow"),
    ("cluster.", "mtbf_hours", SOME, FINITE, "must be above 0 (hours between two failures of a node)"),
    ("parallelism.", "virtual_stages bucket_layers compression_rank offload_buffer_mib", 1, SIZE, AT_LEAST_1),
    ("parallelism.", "zero", 0, 3, "is not a ZeRO stage; use 0, 1, 2 or 3"),
    ("parallelism.", "prefetch", 0, INTEGER, "must not be negative; 0 turns prefetching off"),
    ("parallelism.", "timeout_seconds", SOME, 1_000_000, "must be above 0 and at most 1,000,000"),  # eleven days
    ("trainer.", "max_steps stop_step log_interval eval_samples spike.patience", 1, INTEGER, AT_LEAST_1),
    ("trainer.", "max_epochs", SOME, 1_000_000, "must be above 0 and at most 1,000,000"),
    ("trainer.", "spike.window", 8, INTEGER, "must be at least 8"),
    ("trainer.", "spike.threshold spike.rise spike.margin spike.max_rewinds", 0, FINITE, "must be at least 0"),
    ("trainer.", "eval_interval sample_tokens max_restarts replica_check_interval gc_freq", 0, INTEGER, OFF_AT_0),
    ("trainer.", "max_time", SOME, FINITE, "must be above 0 (minutes)"),
    ("trainer.", "host_memory_limit", SOME, FINITE, "must be above 0 (GiB per rank), or null for no limit"),
    ("checkpoint.", "interval", 0, INTEGER, "must not be negative; 0 saves only at the end"),
    ("checkpoint.", "keep", 0, INTEGER, "must not be negative; 0 keeps all"),
    ("checkpoint.", "keep_every memory_interval replicas", 0, INTEGER, OFF_AT_0),
    ("checkpoint.", "timeout_seconds", SOME, FINITE, "must be above 0; the default is 1800"),
]
LARGEST = {"num_layers": LAYERS, "vocab_size": VOCABULARY}  # keys of a model with another limit than SIZE


def check_bounds(config: Config) -> None:
    """Raise a one-line ConfigError for the first number outside its range, for NaN, and for the first list or dict
    with an element of another type."""
    try:
        _elements(config, "")
    except DocumentError as error:
        raise ConfigError(str(error)) from None
    degrees = " ".join(axis.key for axis in every_axis())
    sizes = [("model.", name, 1, LARGEST.get(name, SIZE), AT_LEAST_1) for name in spec_of(config.model).positive]
    for section, keys, least, most, requirement in [*sizes, ("parallelism.", degrees, 1, RANKS, AT_LEAST_1), *BOUNDS]:
        for key in (f"{section}{name}" for name in keys.split()):
            value = attrgetter(key)(config)
            if value is not None and not least <= value <= most:
                above = value > most and most in (INTEGER, LAYERS, RANKS, SIZE, VOCABULARY)
                raise ConfigError(f"{key}={value} {f'must be at most {most:,}' if above else requirement}")


def _elements(section: Any, key: str) -> None:
    """Raise DocumentError for NaN, and for a list or dict with an element of another type.

    omegaconf 2.3.1 checks the types of scalars among the elements, but accepts lists and dicts in their place.
    """
    for name, kind in _hints(type(section)).items():
        value, where = getattr(section, name), f"{key}{name}"
        if is_dataclass(value):
            _elements(value, f"{where}.")
        elif isinstance(value, list | dict):
            checked(value, kind, where)
        elif isinstance(value, float) and math.isnan(value):  # neither below nor above any limit
            raise DocumentError(f"{where}=nan is not a number; give one")


@cache
def _hints(schema: type) -> Mapping[str, Any]:
    """Return the types of a schema's fields, with Any in the place of types that documents do not have."""
    return {name: _plain(kind) for name, kind in get_type_hints(schema).items()}


def _plain(kind: Any) -> Any:
    if kind in (int, float, str, bool, NoneType):
        return kind
    parts = tuple(map(_plain, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return Union[parts]  # noqa: UP007 (of a number of types that is not known)
    return get_origin(kind)[parts] if get_origin(kind) in (list, dict) else Any
