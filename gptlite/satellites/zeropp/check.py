"""Checks of `parallelism.zeropp`. Does not import torch."""

from __future__ import annotations

from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.parallelism.config import Compression, ZeroppConfig
from gptlite.parallelism.layout import divisors, listed, splits_backward

OFF = "parallelism.zeropp.weights=none parallelism.zeropp.secondary=false parallelism.zeropp.gradients=none"


def options(zeropp: ZeroppConfig) -> str:
    """Return the options that are on, as on a command line; "" if there are none."""
    on = {
        "weights": zeropp.weights.value if zeropp.weights is not Compression.none else "",
        "secondary": "true" if zeropp.secondary else "",
        "gradients": zeropp.gradients.value if zeropp.gradients is not Compression.none else "",
    }
    return " ".join(f"parallelism.zeropp.{key}={value}" for key, value in on.items() if value)


def wanted(config: Config) -> bool:
    """Return True if any option of a run is on."""
    return bool(options(config.parallelism.zeropp))


def check_zeropp(config: Config) -> None:
    """Raise ConfigError if another key rules out ZeRO++."""
    layout = config.parallelism
    size, on = layout.zeropp.node_size, options(layout.zeropp)
    if size is not None and size < 1:
        raise ConfigError(f"parallelism.zeropp.node_size={size} must be at least 1; null: the data ranks of a machine")
    if not on:
        return
    if Compression.powersgd in (layout.zeropp.weights, layout.zeropp.gradients):
        raise ConfigError(f"{on}: powersgd is no codec of single values; use int8 or int4")
    if layout.compression is not Compression.none:
        raise ConfigError(
            f"{on} with parallelism.compression={layout.compression.value}: both replace the sums of gradients; use "
            f"parallelism.compression=none, or {OFF}"
        )
    if layout.auto:  # the planner checks each of its layouts
        return
    if layout.zero != 3:
        raise ConfigError(
            f"{on} with parallelism.zero={layout.zero}, which gathers parameters once a step and keeps them for the "
            f"backward pass; use parallelism.zero=3, or {OFF}"
        )
    if layout.zeropp.secondary and splits_backward(layout):
        raise ConfigError(
            f"parallelism.zeropp.secondary=true with parallelism.schedule={layout.schedule}, whose split backward "
            "passes gather whole parts over all data ranks; use parallelism.schedule=1f1b, or "
            "parallelism.zeropp.secondary=false"
        )
    if layout.offload_parameters:
        raise ConfigError(
            f"{on} with parallelism.offload_parameters=true, which reads shards from files ahead of dense gathers; use "
            f"parallelism.offload_parameters=false, or {OFF}"
        )
    if layout.expert > 1:
        raise ConfigError(
            f"{on} with parallelism.expert={layout.expert}: experts are gathered over fewer ranks than other "
            f"parameters; use parallelism.expert=1, or {OFF}"
        )
    if layout.data is not None and layout.data % layout.dp_replicate == 0:
        check_ranks(layout.zeropp, layout.data * layout.context // layout.dp_replicate)


def check_ranks(zeropp: ZeroppConfig, ranks: int) -> None:
    """Raise ConfigError if the options make no sense with parameters sharded over so many `ranks`."""
    if ranks == 1:
        raise ConfigError(
            f"{options(zeropp)}: each data rank holds all parameters, so none are sent; use more data ranks, or {OFF}"
        )
    if zeropp.node_size is not None and ranks % zeropp.node_size:
        raise ConfigError(
            f"parallelism.zeropp.node_size={zeropp.node_size} does not divide the {ranks} ranks that parameters are "
            f"sharded over; try parallelism.zeropp.node_size={listed(divisors(ranks))}"
        )
