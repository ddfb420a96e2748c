"""Step time by the speed of the links between nodes, with dense gradients and with each way to compress them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from gptlite.config.checks import check_layout
from gptlite.config.cluster import ClusterConfig
from gptlite.config.plugins import CHECKS
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.parallelism.config import Compression
from gptlite.parallelism.layout import Layout, resolve
from gptlite.progress import Log
from gptlite.satellites.onebit.configs import OneBitAdamConfig
from gptlite.satellites.plan.cost import Costs
from gptlite.satellites.plan.local import this_machine
from gptlite.satellites.plan.planning import cluster_worlds, given_keys, with_planned_vocabulary, workload_of
from gptlite.satellites.plan.search import ERROR, UNKNOWN
from gptlite.satellites.plan.workload import Workload

PER_DECADE = 20
SPEEDS = tuple(0.01 * 10 ** (step / PER_DECADE) for step in range(round(4.6 * PER_DECADE) + 1))  # Gb/s: 0.01 to 400
DENSE, ONEBIT = (
    "dense",
    "onebit",
)  # names of curves besides those of codecs, as tools/bench_wire.py has them in the docs
UNITS = {"k": 1e-6, "m": 1e-3, "g": 1.0}  # Gb/s


@dataclass(frozen=True)
class Curve:
    """Seconds of a step at each of SPEEDS. `measured`: pairs of a speed and seconds of a real run."""

    seconds: tuple[float, ...]
    measured: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class LinkCurves:
    """Curves of a layout on a cluster, by name, and the reasons against others. The first is that of dense fp32."""

    work: Workload
    cluster: ClusterConfig
    curves: dict[str, Curve]
    refused: dict[str, str]

    def gains(self, name: str) -> list[float]:
        """Return the ratios of dense seconds to those of a curve, at each of SPEEDS."""
        dense = self.curves[DENSE].seconds
        return [first / other for first, other in zip(dense, self.curves[name].seconds, strict=True)]

    def pays_below(self, name: str) -> float | None:
        """Return the highest of SPEEDS at which a curve is faster than dense by more than the planner's error; None if
        there is none."""
        faster = zip(SPEEDS, self.gains(name), strict=True)
        return max((speed for speed, gain in faster if gain > 1 + ERROR), default=None)


def link_curves(config: Config, rows: Path | None = None, log: Log = print) -> LinkCurves:
    """Return the curves of a configuration's layout on all ranks of its cluster, ZeRO 0 if none is given.

    1-bit Adam's curve is that of a step after the warm-up. `rows`: the rows.json of a benchmark of links, for the
    measured points. Raises ConfigError for a cluster of one node, and for a layout that cannot run.
    """
    config = with_planned_vocabulary(replace(config, parallelism=replace(config.parallelism, auto=False)), log)[0]
    cluster = this_machine(config.cluster, log, explicit=given_keys(config, "cluster"))
    if (cluster.nodes or 1) < 2:
        raise ConfigError(f"links=true varies the link between nodes, and cluster={cluster.name} has one; "
                          "use cluster.nodes=2 or more")  # fmt: skip
    world = max(cluster_worlds(cluster, config))
    layout = resolve(config.parallelism, world)
    data = world // layout.size("tp", "pp") // layout.context  # so that the batch is checked
    config = replace(config, parallelism=replace(config.parallelism, data=data))
    measured = _measured(rows) if rows else {}
    curves, refused = {}, {}
    for name, variant in _variants(config).items():
        try:
            work = _work(variant, layout, cluster)
        except ConfigError as error:
            if name == DENSE:
                raise
            refused[name] = str(error)
            continue
        work = replace(work, exchanging=name == ONEBIT)
        curves[name] = Curve(tuple(seconds_at(work, cluster, speed) for speed in SPEEDS), measured.get(name, ()))
    return LinkCurves(_work(_variants(config)[DENSE], layout, cluster), cluster, curves, refused)


def seconds_at(work: Workload, cluster: ClusterConfig, speed: float) -> float:
    """Return the predicted seconds of a step with links of `speed` Gb/s between nodes."""
    inter = replace(cluster.inter, gb_per_second=speed / 8)
    return Costs(replace(cluster, inter=inter)).predict(work, UNKNOWN).step_seconds


def _work(config: Config, layout: Layout, cluster: ClusterConfig) -> Workload:
    check_layout(config)
    for refuse in CHECKS:
        refuse(config)
    return workload_of(config, layout, cluster)


def _variants(config: Config) -> dict[str, Config]:
    """Return the configuration with dense gradients in fp32, with each codec, and with 1-bit Adam."""
    codecs = {codec.value.replace("none", DENSE): codec for codec in Compression}
    compressed = {
        name: replace(config, parallelism=replace(config.parallelism, compression=codec))
        for name, codec in codecs.items()
    }
    return compressed | {ONEBIT: replace(compressed[DENSE], optimizer=OneBitAdamConfig(lr=config.optimizer.lr))}


def _measured(file: Path) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return the measured points of each run over links of a known speed. Raises ConfigError for another file."""
    points: dict[str, tuple[tuple[float, float], ...]] = {}
    try:
        for row in json.loads(file.read_text(encoding="utf-8")):
            if match := re.fullmatch(r"([\d.]+)([kmg])bit", row["link"]):
                point = float(match[1]) * UNITS[match[2]], float(row["seconds"])
                points[row["run"]] = (*points.get(row["run"], ()), point)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"measured={file} has no rows of a benchmark of links: {error}; give its rows.json, or leave it out"
        ) from None
    return points
