"""Description of this machine as a cluster, measured by a calibration or assumed from its hardware."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gptlite import limits
from gptlite.config.cluster import ClusterConfig, LinkConfig
from gptlite.cpu import cpu_cores, cpu_flags, cpu_name, memory_bytes
from gptlite.documents import checked, read_text, refuse_yaml
from gptlite.errors import ConfigError, first_line
from gptlite.invocation import command

CALIBRATION = Path("~/.cache/gptlite/cluster.yaml")  # written by `gptlite plan calibrate`, read by cluster=local
# Assumed rates of a recent CPU core, if there is no calibration.
CORE_FP32_TFLOPS, CORE_GB_PER_SECOND = 0.06, 8.0
CORE_BF16_TFLOPS = {"amx_bf16": 1.0, "avx512_bf16": 0.4}  # by instruction set, fastest first
MAY_BE_ZERO = (
    *("reserved_gib", "matmul_half_size", "attention_half_width", "attention_half_length", "kernel_seconds"),
    *("overlap", "tensor_overlap", "straggle", "congestion", "latency", "dollars_per_device_hour"),
)
LOCAL_LINK = LinkConfig(gb_per_second=2.0, latency=1e-4)  # a copy between two processes of one machine


def this_machine(
    cluster: ClusterConfig,
    log: Callable[[str], None],
    calibration: Path = CALIBRATION,
    explicit: Collection[str] = (),
) -> ClusterConfig:
    """Return a cluster whose numbers of nodes and devices are set; for cluster=local, with this machine's figures.

    These figures are read from the file `calibration`. Values in `cluster` override them if they differ from
    ClusterConfig's defaults, or if their keys (such as memory_gib or intra.latency) are in `explicit`. Without a
    calibration, figures are assumed, and `log` receives the command that calibrates. Raises ConfigError for an
    unreadable file and for numbers out of range.
    """
    if cluster.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"cluster.device={cluster.device} must be auto, cpu or cuda")
    _check_numbers("cluster", asdict(cluster))
    if cluster.name != "local":
        if cluster.device == "auto":
            raise ConfigError("cluster.device=auto is only for cluster=local; give cpu or cuda")
        return replace(
            cluster, nodes=cluster.nodes or 1, devices_per_node=cluster.devices_per_node or _devices(cluster.device)
        )
    try:
        file = calibration.expanduser()
    except RuntimeError:  # without a home folder, nothing has been measured
        file = None
    measured = file and read_calibration(file)
    if measured is None:
        log(
            f"cluster=local has not been measured; for better predictions, run {command('plan')} calibrate (one minute)"
        )
        measured = assumed()
        if not measured.peak_tflops:
            raise ConfigError(
                f"the peak FLOP/s of {fingerprint()} is unknown; measure this machine with {command('plan')} calibrate"
            )
    return replace(
        checked(_with_given(asdict(measured), asdict(cluster), asdict(ClusterConfig()), explicit), ClusterConfig),
        name="local",
        device=measured.device,
        nodes=cluster.nodes or 1,
        devices_per_node=cluster.devices_per_node or measured.devices_per_node,
    )


def _devices(kind: str) -> int:
    """Return the number of this machine's cores or GPUs. Raises ConfigError without a GPU."""
    if kind == "cpu":
        return cpu_cores()
    import torch

    if not (gpus := torch.cuda.device_count()):
        raise ConfigError("cluster.devices_per_node=null: this machine has no GPU to count; give the GPUs of a node")
    return gpus


def _check_numbers(key: str, values: dict[str, Any]) -> None:
    """Raise ConfigError unless all numbers are above 0, or at least 0 for the keys in MAY_BE_ZERO."""
    for name, value in values.items():
        if isinstance(value, dict):
            _check_numbers(f"{key}.{name}", value)
        elif isinstance(value, int | float) and not (value > 0 or (value == 0 and name in MAY_BE_ZERO)):
            raise ConfigError(f"{key}.{name}={value:g} must be {'at least' if name in MAY_BE_ZERO else 'above'} 0")


def _with_given(measured: Any, wanted: Any, plain: Any, explicit: Collection[str], key: str = "") -> Any:
    """Return the measured values, replaced by those of `wanted` that differ from the defaults in `plain` or whose keys
    are in `explicit`. Nested dicts are merged."""
    if isinstance(wanted, dict):
        found, fresh = measured or {}, plain or {}
        return found | {
            name: _with_given(found.get(name), value, fresh.get(name), explicit, f"{key}.{name}".lstrip("."))
            for name, value in wanted.items()
        }
    return wanted if wanted != plain or key in explicit else measured


def read_calibration(file: Path) -> ClusterConfig | None:
    """Return the cluster that `write_calibration` wrote; None if the file does not exist or describes another machine.

    Raises ConfigError if the file cannot be read.
    """
    import yaml

    if not file.exists():
        return None
    try:
        refuse_yaml(text := read_text(file, limits.YAML_BYTES))
        # By libyaml, as in refuse_yaml: PyYAML's own parser refuses more, such as tabs in a key.
        raw = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        machine = raw.pop("machine")
        cluster = checked(raw, ClusterConfig)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        reason = first_line(error)
        raise ConfigError(f"{file}: {reason}; delete the file, or run {command('plan')} calibrate again") from error
    return cluster if machine == fingerprint() else None


def write_calibration(file: Path, cluster: ClusterConfig) -> None:
    """Write the measured cluster to `file`, with the machine's fingerprint."""
    from yaml import safe_dump

    from gptlite.files import write_whole

    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, safe_dump(asdict(cluster) | {"machine": fingerprint()}, sort_keys=False))


def fingerprint() -> str:
    """Return a description of this machine's processor, cores and GPUs, which identifies it in a calibration."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([cpu_name() or platform.machine(), f"{cpu_cores()} cores", *gpus])


def assumed() -> ClusterConfig:
    """Return this machine as a cluster, with figures assumed from its hardware. `peak_tflops` is empty for an unknown
    GPU."""
    import torch

    from gptlite.metrics.devices import peak_flops

    if gpus := torch.cuda.device_count():
        name = torch.cuda.get_device_name(0)
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return ClusterConfig(
            devices_per_node=gpus,
            memory_gib=torch.cuda.get_device_properties(0).total_memory / 2**30,
            host_memory_gib=memory_bytes() / 2**30,
            peak_tflops={key: peak / 1e12 for key, dtype in dtypes.items() if (peak := peak_flops(name, dtype))},
        )
    cores, flags = cpu_cores(), cpu_flags()
    peaks = {"fp32": CORE_FP32_TFLOPS * cores}
    if bf16 := next((rate for flag, rate in CORE_BF16_TFLOPS.items() if flag in flags), None):
        peaks["bf16"] = bf16 * cores
    return ClusterConfig(
        device="cpu",
        devices_per_node=cores,
        memory_gib=memory_bytes() / 2**30,
        reserved_gib=0.5,
        peak_tflops=peaks,
        memory_gb_per_second=CORE_GB_PER_SECOND * cores,
        intra=LOCAL_LINK,
        inter=LOCAL_LINK,
    )
