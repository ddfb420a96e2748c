"""One published run, and what the planner says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from yaml import safe_load

from gptlite.config.cluster import ClusterConfig, LinkConfig
from gptlite.config.schema import CONF_DIR
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import flops_per_token
from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.satellites.plan.cost import predict
from gptlite.satellites.plan.search import UNKNOWN
from gptlite.satellites.plan.workload import Prediction, Workload

# FlashAttention-2 does not use an H100's new instructions: forward and backward, it reaches at most 335 TFLOP/s, and on
# an A100 203 (arXiv:2307.08691, figures 4 and 7). This is the efficiency of `a100-80gb` in proportion.
FLASH_2_ON_H100 = {"attention_efficiency": 0.67 * (335 / 989.4) / (203 / 312)}
SAMPLES, TOKENS = "samples/s", "tokens/s per GPU"
TFLOPS = "TFLOP/s per GPU"  # recomputation counted
MFU, FULL_MFU = "% MFU", "% MFU, full attention"  # with the causal half of attention's scores, or all of them


@dataclass(frozen=True)
class Row:
    """One run: `published` in `unit`. `approximate`: what the workload says otherwise than the run, or guesses.

    `hides`: whether the code base hides collectives behind compute. `counted`: whether a fit and the limits include it.
    `keys`: keys of the cluster in which the run's machine differs from the preset. `stack`: the code base, with its
    settings, see `stacks.py`. `half_kept`: selective recomputation computes every other product again, so that its time
    is the mean of those of our selective and of full recomputation.
    """

    name: str
    cluster: str
    work: Workload
    published: float
    unit: str
    approximate: str = ""
    hides: bool = True
    counted: bool = True
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stack: str = ""
    half_kept: bool = False

    def sheet(self) -> ClusterConfig:
        """The cluster's constants from data sheets."""
        cluster = preset(self.cluster)
        for key, value in self.keys.items():
            cluster = with_key(cluster, key, value)
        return cluster

    def prediction(self, cluster: ClusterConfig | None = None) -> Prediction:
        """The planner's step, by data sheets unless a cluster is given."""
        return self._of(self.work, cluster or self.sheet())

    def _of(self, work: Workload, cluster: ClusterConfig) -> Prediction:
        return predict(work, cluster if self.hides else replace(cluster, overlap=0.0), UNKNOWN)

    def predicted(self, cluster: ClusterConfig | None = None) -> float:
        """Throughput in the row's unit."""
        speed = self.prediction(cluster).tokens_per_second
        if self.half_kept:
            config = replace(self.work.parallelism, activation_checkpointing=ActivationCheckpointing.full)
            full = self._of(replace(self.work, parallelism=config), cluster or self.sheet()).tokens_per_second
            speed = 2 / (1 / speed + 1 / full)
        return speed * self.per_token()

    def error(self, cluster: ClusterConfig | None = None) -> float:
        """Predicted over published throughput, less one."""
        return self.predicted(cluster) / self.published - 1

    def per_token(self) -> float:
        """The row's unit for a token a second over all ranks."""
        its, work, world = self.work.model, self.work, self.work.layout.world_size
        if self.unit == SAMPLES:
            return 1 / work.sequence_length
        if self.unit == TOKENS:
            return 1 / world
        if self.unit == TFLOPS:
            return recomputed_flops(its) / world / 1e12
        causal = flops_per_token(its, work.sequence_length)
        masked = 6 * its.num_layers * its.d_model * work.sequence_length if self.unit == FULL_MFU else 0
        return 100 * (causal + masked) / (world * self.sheet().peak_tflops[work.dtype] * 1e12)


def recomputed_flops(model: GPTConfig) -> float:
    """FLOPs of a token with recomputation: 96 l h² (1 + s/6h + V/16lh) (arXiv:2104.04473, section 5.1)."""
    length, width, layers, vocab = model.sequence_length, model.d_model, model.num_layers, model.padded_vocab_size
    return 96 * layers * width**2 * (1 + length / (6 * width) + vocab / (16 * layers * width))


def value_of(cluster: ClusterConfig, key: str) -> float:
    """The cluster's value for a key, which may lead into a dtype's or a link's."""
    found: Any = cluster
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def with_key(cluster: ClusterConfig, key: str, value: Any) -> ClusterConfig:
    """The cluster with another value for a key."""
    name, _, inner = key.partition(".")
    old = getattr(cluster, name)
    if isinstance(old, dict):
        value = old | {inner: value}
    elif inner:
        value = replace(old, **{inner: value})
    return replace(cluster, **{name: value})


@cache
def preset(name: str) -> ClusterConfig:
    """The cluster of conf/cluster/<name>.yaml, without composing a configuration."""
    raw: dict[str, Any] = safe_load((CONF_DIR / "cluster" / f"{name}.yaml").read_text(encoding="utf-8"))
    raw.pop("defaults")
    raw |= {key: LinkConfig(**raw[key]) for key in ("intra", "inter") if key in raw}
    return ClusterConfig(**raw)
