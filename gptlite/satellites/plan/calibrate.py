"""Calibration of this machine: throughput of products and attention, memory bandwidth, launch overhead, link speed.

Most figures are the best of several runs, which reduces the noise of other programs. On a machine that is busy all the
time, they are the figures of the busy machine.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing import TimeoutError as RanksTimeoutError
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import benchmark

from gptlite.config.cluster import ClusterConfig, LinkConfig
from gptlite.cpu import cpu_cores
from gptlite.ops.attention import packed_causal_attention
from gptlite.ops.config import Attention, OpsConfig
from gptlite.ops.select import select_ops
from gptlite.precision import native_bf16
from gptlite.progress import Log
from gptlite.satellites.plan.local import LOCAL_LINK, assumed, fingerprint

# Dims of the timed matrix products: the values of the inner dim, and the size of the two outer dims.
INNER = {"cpu": (16, 32, 64, 128, 256, 512, 1024), "cuda": (64, 128, 256, 512, 1024, 2048, 4096, 8192)}
OUTER = {"cpu": 1024, "cuda": 8192}
# Size of each tensor of the pointwise op. On a CPU it is that of a small model's activations, which may fit the caches.
POINTWISE_BYTES = {"cpu": 8 * 2**20, "cuda": 512 * 2**20}
TRIES = 5  # smallest number of timed runs
MOST_RANKS = 8  # maximum number of processes started to measure the cost of sharing cores
RANKS_SECONDS = 45.0  # timeout of the ranks' measurements, in case they cannot connect
PCIE = LinkConfig(gb_per_second=25, efficiency=0.8, latency=1e-5)
SMALL, LARGE = 1024, 2**20  # floats of the two all-reduces: the small one gives latency, the large one bandwidth
IN_A_ROW = 20  # all-reduces per timed run
PRODUCT = 256  # dims of the product computed around an all-reduce, and of the one timed on shared cores
CROWD_SECONDS = 1.0  # shortest timing of the product on shared cores


def calibrate(seconds: float, log: Log) -> ClusterConfig:
    """Measure this machine in about `seconds` and return it as a cluster; `log` receives a line per figure.

    If there are several GPUs, compute is measured on the first. With one GPU, the link is assumed to be PCIe.
    """
    here = assumed()
    on_gpu, device = here.device == "cuda", torch.device(here.device)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if not on_gpu:
        dtypes = {name: dtypes[name] for name in ("fp32", "bf16")[: 1 + native_bf16(device)[0]]}
    matmul_seconds = max(0.5, seconds / 3 / len(dtypes))
    peaks: dict[str, float] = dict(here.peak_tflops) if on_gpu else {}
    efficiency, halves, attention = {}, {}, {}
    choice = select_ops(OpsConfig(), device, log).attention
    for name, dtype in dtypes.items():
        rates = matmul_rates(device, dtype, matmul_seconds)
        largest, halves[name] = saturation(rates)
        # A GPU's peak is that of the data sheet; otherwise the best rate seen, so that the efficiency is at most 1.
        peaks.setdefault(name, max(largest, *rates.values()) / 1e12)
        efficiency[name] = min(1.0, largest / 1e12 / peaks[name])
        words = ", ".join(f"{k}: {rate / 1e12:.3g}" for k, rate in rates.items())
        log(f"matrix products in {name}, TFLOP/s by inner dim: {words}; half of full speed at dim {halves[name]:.0f}")
        attention[name] = attention_rate(device, dtype, choice, seconds / 20 / len(dtypes)) / 1e12
        log(f"attention ({choice.value}) in {name} reaches {attention[name]:.3g} TFLOP/s")
    bandwidth, kernel = memory_bandwidth(device, seconds / 20), kernel_seconds(device)
    log(f"pointwise ops move {bandwidth / 1e9:.1f} GB/s and take {kernel * 1e6:.1f} us to launch")
    threads = 1.0 if on_gpu else thread_efficiency(cpu_cores())
    link, crowding = ranks(device, log)
    if not on_gpu and cpu_cores() > 1:
        log(f"one rank on all cores reaches {threads:.0%} of the combined speed of one rank per core")
    return replace(
        here,
        name="local",
        peak_tflops=peaks,
        matmul_efficiency=efficiency,
        matmul_half_size=halves["bf16" if "bf16" in dtypes else "fp32"],
        attention_tflops=attention,
        memory_gb_per_second=bandwidth / 1e9,
        memory_efficiency=1.0,
        kernel_seconds=kernel,
        intra=link,
        inter=link,
        overlap=0.8 if on_gpu else 0.0,  # on a CPU the cores that communicate do not compute
        thread_efficiency=threads,
        crowding=crowding,
        calibrated=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {fingerprint()}",
    )


def saturation(rates: dict[int, float]) -> tuple[float, float]:
    """Return the asymptotic rate of large matrix products in FLOP/s, and the inner dim at which half of it is reached.

    `rates` maps the inner dim k to FLOP/s. The model is 1/rate = 1/largest + half/(largest k). The fit minimizes the
    squared relative error of 1/rate.
    """
    # With a = 1/largest and b = half/largest, each row is rate_k (a + b/k) = 1.
    rows = torch.tensor([(rate, rate / k) for k, rate in rates.items()], dtype=torch.float64)
    a, b = torch.linalg.lstsq(rows, torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten().tolist()
    if a <= 0 or b <= 0:  # noise: larger products were no faster, so the fit has no meaning
        return max(rates.values()), 0.0
    return 1 / a, b / a


def matmul_rates(device: torch.device, dtype: torch.dtype, seconds: float) -> dict[int, float]:
    """Return the FLOP/s of products [n, k] x [k, n], keyed by k."""
    rates, outer = {}, OUTER[device.type]
    for inner in INNER[device.type]:
        a = torch.randn(outer, inner, device=device, dtype=dtype)
        b = torch.randn(inner, outer, device=device, dtype=dtype)
        out = torch.empty(outer, outer, device=device, dtype=dtype)
        took = best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), seconds / len(INNER[device.type]))
        rates[inner] = 2 * outer * outer * inner / took
    return rates


def memory_bandwidth(device: torch.device, seconds: float) -> float:
    """Return the bytes per second that an addition of two tensors reads and writes."""
    count = POINTWISE_BYTES[device.type] // 4
    a, b = torch.randn(count, device=device), torch.randn(count, device=device)
    out = torch.empty_like(a)
    return 3 * 4 * count / best(lambda: torch.add(a, b, out=out), seconds)


def kernel_seconds(device: torch.device) -> float:
    """Return the seconds of an op on a tiny tensor, autograd's bookkeeping included."""
    x = torch.randn(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(100):
            y = y + x
        y.sum().backward()

    return best(chain, 1.0) / 200  # forward and backward


def attention_rate(device: torch.device, dtype: torch.dtype, choice: Attention, seconds: float) -> float:
    """Return the FLOP/s of causal attention in a forward and a backward pass, with the implementation that a run would
    use; the masked half is not counted."""
    batch, heads, length, wide = (1, 8, 1024, 64) if device.type == "cpu" else (8, 16, 2048, 64)
    qkv = torch.randn(batch, length, heads, 3, wide, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(batch, length, heads, wide, device=device, dtype=dtype)
    took = best(lambda: packed_causal_attention(qkv, choice).backward(gradient), seconds)
    return 7 * batch * heads * length * length * wide / took  # two GEMMs forward, five backward; half of each


def thread_efficiency(cores: int) -> float:
    """Return the speed of one rank on all cores as a share of the cores' combined speed, for MLPs with a norm.

    The share is below 1 because small ops, and the Python code between ops, run on a single core.
    """
    layers = [nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)]
    model, x = nn.Sequential(*layers, *layers), torch.randn(512, 256)
    took = []
    for threads in (1, cores):
        with benchmark.set_torch_threads(threads):
            took.append(best(lambda: model(x).sum().backward(), 1.0))
    return min(1.0, took[0] / (took[1] * cores))


def best(work: Callable[[], Any], seconds: float) -> float:
    """Return the shortest seconds of one call of `work`, over as many runs as fit in `seconds`, at least TRIES."""
    count = 20 if torch.cuda.is_available() else 1  # calls per run: on a GPU this hides the launch latency
    timer = timeit.Timer(work, timer=benchmark.timer)  # synchronizes with the GPU
    timer.timeit(1)
    end, times = time.perf_counter() + seconds, list[float]()
    while len(times) < TRIES or time.perf_counter() < end:
        times.append(timer.timeit(count))
    return min(times) / count


def ranks(device: torch.device, log: Log) -> tuple[LinkConfig, float]:
    """Return the link between two ranks, and the slowdown of ranks that share cores, relative to an even share.

    With one device, or if the ranks fail or hang, return an assumed link and 1.
    """
    cores, on_gpu = cpu_cores(), device.type == "cuda"
    count = torch.cuda.device_count() if on_gpu else min(2 * cores, MOST_RANKS)
    if count < 2:
        log("one GPU: its link is assumed to be PCIe, not measured")
        return PCIE, 1.0
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(count) as pool:
        each = [(f"file://{folder}/store", count, rank) for rank in range(count)]
        try:
            link, crowding = pool.starmap_async(rank_figures, each, chunksize=1).get(RANKS_SECONDS)[0]
        except (RanksTimeoutError, RuntimeError):
            log(f"{count} ranks did not finish within {RANKS_SECONDS:.0f} s; their link is assumed, not measured")
            return PCIE if on_gpu else LOCAL_LINK, 1.0
    log(f"two ranks: {link.gb_per_second:.2f} GB/s, {link.latency * 1e6:.0f} us")
    if not on_gpu and count > cores:
        log(f"{count} ranks on {cores} cores take {crowding:.2f} times as long as an even share of the cores would")
    return link, crowding


def rank_figures(store: str, count: int, rank: int) -> tuple[LinkConfig, float]:
    """Measure on one of `count` ranks, and return the link and the slowdown relative to an even share of the cores.

    The first two ranks time all-reduces. Then rank 0 alone times products, and then all ranks do. The caller uses the
    result of rank 0.
    """
    for stream in (1, 2):  # discard what gloo and NCCL print to the terminal
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    cores, on_gpu = cpu_cores(), torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, cores // 2))  # two ranks measure the link, and each uses half of the cores
    os.environ["GLOO_SOCKET_IFNAME"] = next((name for _, name in socket.if_nameindex() if name[:2] == "lo"), "lo")
    backend, patience = "nccl" if on_gpu else "gloo", timedelta(seconds=30)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=patience)
    pair, link, crowding = dist.new_group([0, 1]), LinkConfig(), 1.0
    if rank < 2:
        link = link_of(*(_added(floats, device, pair) for floats in (SMALL, LARGE)))
    dist.barrier()
    if not on_gpu:
        alone = _product_seconds() if rank == 0 else 1.0
        dist.barrier()
        crowded = torch.tensor(_product_seconds())
        dist.all_reduce(crowded)
        if count > cores:  # else no core is shared
            crowding = max(1.0, float(crowded) / count / (alone * count / cores))
    dist.destroy_process_group()
    return link, crowding


def link_of(small: float, large: float) -> LinkConfig:
    """Return the link on which all-reduces of SMALL and LARGE floats over two ranks take these seconds.

    A ring all-reduce over two ranks sends the tensor's bytes once, in two steps. On a busy machine, the small one may
    take as long as the large one. The bytes then count as a tenth of the large one's time.
    """
    small, large = max(small, 1e-6), max(large, 1e-6)
    return LinkConfig(gb_per_second=4 * LARGE / max(large - small, large / 10) / 1e9, latency=small / 2)


def _added(count: int, device: torch.device, group: Any) -> float:
    """Return the seconds that an all-reduce of `count` floats adds to the matrix products before it, as in a layer.

    With products in between, the time includes the wait for a late rank; back-to-back all-reduces would hide that wait.
    """
    tensor, a = torch.ones(count, device=device), torch.randn(PRODUCT, PRODUCT, device=device)
    out = torch.empty_like(a)

    def work(summing: bool) -> float:
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            for _ in range(4):
                torch.mm(a, a, out=out)
            if summing:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / IN_A_ROW

    work(True)
    alone = min(work(False) for _ in range(TRIES))
    together = sorted(work(True) for _ in range(TRIES))
    return together[TRIES // 2] - alone


def _product_seconds() -> float:
    """Return the mean seconds of a matrix product on one core. The mean, unlike the minimum, includes the time during
    which other ranks use the core."""
    a = torch.randn(PRODUCT, PRODUCT)
    timer = benchmark.Timer("torch.mm(a, a)", globals={"torch": torch, "a": a}, num_threads=1)
    return timer.blocked_autorange(min_run_time=CROWD_SECONDS).mean
