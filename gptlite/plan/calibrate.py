"""This machine's figures, measured: how fast it multiplies, copies, starts an op, and talks between two ranks.

Every figure is of the best of several tries, so that another program's noise counts little; a machine that is busy
throughout looks as slow as it is.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.plan.config import ClusterConfig, LinkConfig
from gptlite.plan.local import LOCAL_LINK, cpu_cores, fingerprint, gpu_peaks, physical_gib
from gptlite.precision import native_bf16

if TYPE_CHECKING:
    import torch

    from gptlite.ops.config import Attention

Log = Callable[[str], None]

# The smallest dim of the products that are timed, and the two others.
INNER = {"cpu": (16, 32, 64, 128, 256, 512, 1024), "cuda": (64, 128, 256, 512, 1024, 2048, 4096, 8192)}
OUTER = {"cpu": 1024, "cuda": 8192}
# A tensor of the pointwise op: on a CPU as large as a small model's activations, which its caches may hold.
POINTWISE_BYTES = {"cpu": 8 * 2**20, "cuda": 512 * 2**20}
TRIES = 5
MOST_RANKS = 8  # that are started to see what it costs to share cores
RANKS_SECONDS = 45.0  # after which ranks that talk to nobody are given up
PCIE = LinkConfig(gb_per_second=25, efficiency=0.8, latency=1e-5)


def calibrate(seconds: float, log: Log) -> ClusterConfig:
    """Measures this machine within about that long and returns it as a cluster; `log` is told what was found.

    With GPUs it measures the first of them; links between GPUs are those of PCIe unless there are two to measure.
    """
    import torch

    from gptlite.ops.config import OpsConfig
    from gptlite.ops.select import select_ops

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    dtypes = {"fp32": torch.float32}
    if kind == "cuda":
        dtypes |= {"bf16": torch.bfloat16, "fp16": torch.float16}
    elif native_bf16(device)[0]:
        dtypes |= {"bf16": torch.bfloat16}
    each = max(0.5, seconds / 3 / len(dtypes))
    peaks, efficiency, halves = known_peaks() if kind == "cuda" else {}, {}, {}
    for name, dtype in dtypes.items():
        rates = matmul_rates(device, dtype, each)
        largest, halves[name] = saturation(rates)
        peaks.setdefault(name, max(largest, *rates.values()) / 1e12)
        efficiency[name] = min(1.0, largest / 1e12 / peaks[name])
        words = ", ".join(f"{k}: {rate / 1e12:.3g}" for k, rate in rates.items())
        log(f"products in {name}, TFLOP/s by smallest dim: {words}; half of its speed at {halves[name]:.0f}")
    main = "bf16" if "bf16" in dtypes else "fp32"
    bandwidth = memory_bandwidth(device, seconds / 20)
    kernel = kernel_seconds(device)
    log(f"pointwise ops move {bandwidth / 1e9:.1f} GB/s and take {kernel * 1e6:.1f} us to start")
    choice = select_ops(OpsConfig(), device, log).attention
    attention = {
        name: attention_rate(device, dtype, choice, seconds / 20 / len(dtypes)) / 1e12 for name, dtype in dtypes.items()
    }
    words = ", ".join(f"{rate:.3g} in {name}" for name, rate in attention.items())
    log(f"attention ({choice.value}) reaches {words} TFLOP/s")
    threads = thread_efficiency(cpu_cores()) if kind == "cpu" else 1.0
    link, crowding = ranks(device, log)
    if kind == "cpu" and cpu_cores() > 1:
        log(f"one rank on all cores reaches {threads:.0%} of what a rank a core would together")
    return ClusterConfig(
        name="local",
        device=kind,
        nodes=1,
        devices_per_node=torch.cuda.device_count() or cpu_cores(),
        memory_gib=_memory_gib(device),
        host_memory_gib=physical_gib() if kind == "cuda" else None,
        reserved_gib=0.5 if kind == "cpu" else 2.0,
        peak_tflops=peaks,
        matmul_efficiency=efficiency,
        matmul_half_size=halves[main],
        attention_tflops=attention,
        memory_gb_per_second=bandwidth / 1e9,
        memory_efficiency=1.0,
        kernel_seconds=kernel,
        intra=link,
        inter=link,
        overlap=0.8 if kind == "cuda" else 0.0,  # on a CPU who talks does not compute
        thread_efficiency=threads,
        crowding=crowding,
        calibrated=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {fingerprint()}",
    )


def known_peaks() -> dict[str, float]:
    """The first GPU's TFLOP/s by data sheet; of one that is not known, nothing."""
    from gptlite.errors import ConfigError

    try:
        return gpu_peaks()
    except ConfigError:
        return {}


def saturation(rates: dict[int, float]) -> tuple[float, float]:
    """The rate that large products tend to, and the smallest dim that reaches half of it, from FLOP/s by smallest dim.

    Least squares of the relative error of 1/rate = 1/largest + half/(largest k), which is linear in both.
    """
    # Each row: rate_k (a + b/k) = 1.
    rows = [(rate, rate / k) for k, rate in rates.items()]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a_, b_ = (sum(x[i] for x in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    a, b = (a_ * bb - b_ * ab) / determinant, (aa * b_ - ab * a_) / determinant
    if a <= 0 or b <= 0:  # noise: larger products were no faster
        return max(rates.values()), 0.0
    return 1 / a, b / a


def matmul_rates(device: torch.device, dtype: torch.dtype, seconds: float) -> dict[int, float]:
    """FLOP/s of products [n, k] x [k, n] by k."""
    import torch

    rates, outer = {}, OUTER[device.type]
    for inner in INNER[device.type]:
        a = torch.randn(outer, inner, device=device, dtype=dtype)
        b = torch.randn(inner, outer, device=device, dtype=dtype)
        out = torch.empty(outer, outer, device=device, dtype=dtype)
        took = best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, seconds / len(INNER[device.type]))
        rates[inner] = 2 * outer * outer * inner / took
    return rates


def memory_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes a second that a sum of two tensors reads and writes."""
    import torch

    count = POINTWISE_BYTES[device.type] // 4
    a, b = torch.randn(count, device=device), torch.randn(count, device=device)
    out = torch.empty_like(a)
    return 3 * 4 * count / best(lambda: torch.add(a, b, out=out), device, seconds)


def kernel_seconds(device: torch.device) -> float:
    """Seconds that an op on next to nothing takes, with what autograd notes of it."""
    import torch

    x = torch.randn(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(100):
            y = y + x
        y.sum().backward()

    return best(chain, device, 1.0) / 200  # forward and backward


def attention_rate(device: torch.device, dtype: torch.dtype, choice: Attention, seconds: float) -> float:
    """FLOP/s of causal attention as a run computes it, forward and backward, its masked half not counted."""
    import torch

    from gptlite.ops.attention import packed_causal_attention

    batch, heads, length, wide = (1, 8, 1024, 64) if device.type == "cpu" else (8, 16, 2048, 64)
    qkv = torch.randn(batch, length, heads, 3, wide, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(batch, length, heads, wide, device=device, dtype=dtype)
    took = best(lambda: packed_causal_attention(qkv, choice).backward(gradient), device, seconds)
    return 7 * batch * heads * length * length * wide / took  # two products forward and five backward, half of each


def thread_efficiency(cores: int) -> float:
    """How much of the cores' speed one rank reaches on all of them, in the passes of an MLP with its norm: in a step
    small ops, and Python between the ops, run on one core whatever there is."""
    import torch
    from torch import nn

    layers = [nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)]
    model, x = nn.Sequential(*layers, *layers), torch.randn(512, 256)
    before, took = torch.get_num_threads(), []
    try:
        for threads in (1, cores):
            torch.set_num_threads(threads)
            took.append(best(lambda: model(x).sum().backward(), torch.device("cpu"), 1.0))
    finally:
        torch.set_num_threads(before)
    return min(1.0, took[0] / (took[1] * cores))


def best(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Seconds that a piece of work takes at its fastest, of as many runs of it as fit, at least TRIES."""
    import torch

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    first = timed(1)
    # A GPU is given several at a time, so that starting them is hidden.
    count = max(1, min(20, int(seconds / TRIES / max(timed(1), 1e-9)))) if device.type == "cuda" else 1
    end, least, tries = time.perf_counter() + seconds, first, 0
    while tries < TRIES or time.perf_counter() < end:
        least = min(least, timed(count))
        tries += 1
    return least


def ranks(device: torch.device, log: Log) -> tuple[LinkConfig, float]:
    """The link between two ranks, and how much longer than their share ranks take that outnumber a CPU's cores.

    Where ranks cannot be started, or hang, the assumed figures and 1.
    """
    import torch

    cores = cpu_cores()
    count = torch.cuda.device_count() if device.type == "cuda" else min(2 * cores, MOST_RANKS)
    assumed = PCIE if device.type == "cuda" else LOCAL_LINK
    if count < 2:
        log("one GPU: nothing to measure a link with")
        return assumed, 1.0
    found = _run_ranks(count, max(1, cores // 2))
    if found is None:
        log(f"{count} ranks did not get through in {RANKS_SECONDS:.0f} s; their link is assumed, not measured")
        return assumed, 1.0
    link = LinkConfig(gb_per_second=found["gb_per_second"], latency=found["latency"])
    crowding = max(1.0, found["crowded"] / (found["alone"] * count / cores)) if count > cores else 1.0
    log(f"two ranks: {link.gb_per_second:.2f} GB/s, {link.latency * 1e6:.0f} us")
    if device.type == "cpu" and count > cores:
        log(f"{count} ranks on {cores} cores take {crowding:.2f} times their share of the time")
    return link, crowding


def _run_ranks(count: int, threads: int) -> dict[str, float] | None:
    """What rank 0 of `calibrate_ranks` prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gptlite.plan.calibrate_ranks", str(Path(folder) / "store"), str(count)]
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback}
        first, *others = (
            subprocess.Popen(
                [*command, str(rank)],
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            for rank in range(count)
        )
        try:
            out, _ = first.communicate(timeout=RANKS_SECONDS)
            return json.loads(out) if first.returncode == 0 else None
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            return None
        finally:
            _end([first, *others])


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _memory_gib(device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    return physical_gib()
