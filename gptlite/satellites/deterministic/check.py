"""Checks of `parallelism.deterministic`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gptlite.config.batch import check_batch
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.models.registry import spec_of
from gptlite.optimizer.config import MuonConfig
from gptlite.optimizer.registry import optimizer_name
from gptlite.parallelism.config import Compression, Offload
from gptlite.parallelism.layout import splits_backward
from gptlite.precision import Precision
from gptlite.satellites.noise.checks import wanted_by
from gptlite.satellites.zeropp.check import OFF as ZEROPP_OFF
from gptlite.satellites.zeropp.check import options

MOST = 2**20  # samples in a step: exact.py
KEY, OFF = "parallelism.deterministic=true", "parallelism.deterministic=false"
PRECISION = "gradients are rounded to 16 bits at other places in one process than by FSDP2"


def wanted(config: Config) -> bool:
    """Return True if a run's results are to have equal bits in all data-parallel layouts."""
    return config.parallelism.deterministic


def check_deterministic(config: Config) -> None:
    """Raise ConfigError for keys with which the results would depend on the layout."""
    if not config.parallelism.deterministic:
        return
    for setting, reason, instead in (*_layout(config), *_others(config)):
        raise refusal(setting, reason, instead)
    # Samples run one by one, whatever data.micro_batch_size is, and some schedules cannot divide every number of them.
    check_batch(replace(config, data=replace(config.data, micro_batch_size=1)))


def refusal(setting: str, reason: str, instead: str) -> ConfigError:
    """Return the error for a `setting` with which bits would depend on the layout."""
    return ConfigError(f"{KEY} with {setting}: {reason}; use {instead}, or {OFF}")


def _layout(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield layouts that are refused: the setting, the reason, and what to use instead."""
    layout = config.parallelism
    if layout.auto:
        yield "parallelism.auto=true", "the planner does not know the cost of exact sums", "a layout that you choose"
    for key, reason in {
        "tensor": "tensor ranks add their parts of a matrix product in fp32",
        "context": "context ranks add the gradients of their parts of a sequence in fp32",
        "expert": "an expert multiplies the tokens of several ranks at once",
    }.items():
        if (degree := getattr(layout, key)) > 1:
            yield f"parallelism.{key}={degree}", reason, f"parallelism.{key}=1"
    if splits_backward(layout):
        reason = "split backward passes compute the gradients of weights by other products"
        yield f"parallelism.schedule={layout.schedule}", reason, "parallelism.schedule=1f1b"
    if layout.pipeline > 1 and (tied := next(iter(spec_of(config.model).tied(config.model)), None)):
        reason = f"the two gradients of {tied}, a tied parameter, are added per sample only in one process"
        yield (
            f"parallelism.pipeline={layout.pipeline}",
            reason,
            "parallelism.pipeline=1, untied parameters",
        )
    if layout.offload is Offload.nvme:
        yield "parallelism.offload=nvme", "gradients in files are summed in fp32", "parallelism.offload=cpu"
    if (compression := layout.compression) is not Compression.none:
        setting = f"parallelism.compression={compression.value}"
        yield setting, "errors of compressed sums depend on the ranks", "parallelism.compression=none"
    if zeropp := options(layout.zeropp):
        yield zeropp, "errors of compressed messages depend on the ranks", ZEROPP_OFF


def _others(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the same for other sections."""
    precision, samples, optimizer = config.precision.dtype, config.data.global_batch_size, config.optimizer
    if precision not in (Precision.auto, Precision.fp32):  # auto is resolved on the ranks' device
        yield f"precision={precision.value}", PRECISION, "precision=fp32"
    if not (optimizer.elementwise or isinstance(optimizer, MuonConfig)):
        name, reason = optimizer_name(type(optimizer)), "its update adds shards of a parameter in fp32"
        yield f"optimizer={name}", reason, "optimizer=adamw, adam, sgd, lion or muon"
    if config.trainer.compile:
        yield "trainer.compile=true", "compiled code may differ between layouts", "trainer.compile=false"
    if noise := wanted_by(config):
        yield noise, "it measures gradients of micro-batches, which are single samples here", f"{noise[:-4]}false"
    if config.data.handed_over:
        yield "gptlite.initialize", "the batches of a program are not split into samples", "gptlite train"
    if samples > MOST:
        yield f"data.global_batch_size={samples}", f"an exact sum has at most {MOST} terms", "a smaller one"
