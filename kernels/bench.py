"""`bench`: the ops against torch's, forward and backward, median of runs in turn.

gptlite-kernels bench [device=cpu] [ops=all] [dtype=bfloat16] [compile=true] [repeats=20]

ops: names, comma-separated, as in `gptlite-kernels test`. "eager" is torch's own ops, "compiled" the same under
torch.compile; on a GPU, Liger's and Apex's layer norm too where they are installed. GB/s counts the bytes that must
travel; the share is of what a copy on this device reaches.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from gptlite.errors import ConfigError, did_you_mean
from gptlite.kernels.cases import CASES, EPS, Case, Inputs, differentiate
from gptlite.kernels.check import check_device
from gptlite.kernels.library import Unavailable, load
from gptlite.kernels.tables import table

DTYPES = ("float32", "bfloat16", "float16")
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
WARM_UP = 3


@dataclass
class Options:
    """The command line."""

    device: str = "cpu"
    ops: str = "all"
    dtype: str = "bfloat16"
    compile: bool = True
    repeats: int = 20


def run(options: Options) -> int:
    """Prints a line for each op and size. Raises ConfigError."""
    check_device(options.device)
    if options.dtype not in DTYPES:
        near = did_you_mean(options.dtype, DTYPES)
        raise ConfigError(f"dtype={options.dtype} is not one of {', '.join(DTYPES)}{near}")
    if options.repeats < 1:
        raise ConfigError(f"repeats={options.repeats} measures nothing; give 1 or more")
    cases = _chosen(options)
    loaded = load(options.device)
    if isinstance(loaded, Unavailable):
        print(f"no kernels: {loaded.reason}")
        return 1
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    copy = copy_speed(device)
    print(f"{loaded.isa}; {torch.get_num_threads()} threads; a copy moves {copy / 1e9:.1f} GB/s")
    rows = [("op", "size", "ours ms", "GB/s", "of copy", "eager", "compiled", "others")]
    for case in cases:
        for size in case.sizes:
            rows.append(_row(case, size, dtype, device, copy, options))
    print(table(rows))
    return 0


def _chosen(options: Options) -> list[Case]:
    cases = [case for case in CASES if not case.cpu_only or options.device == "cpu"]
    if options.ops == "all":
        return cases
    names = {case.ops[0]: case for case in cases}
    for name in options.ops.split(","):
        if name not in names:
            raise ConfigError(f"ops={name} is not there{did_you_mean(name, names)}; there are {', '.join(names)}")
    return [names[name] for name in options.ops.split(",")]


def _row(
    case: Case, size: tuple[int, int], dtype: torch.dtype, device: torch.device, copy: float, options: Options
) -> tuple[str, ...]:
    torch.manual_seed(0)
    inputs = case.make(*size, dtype, device)
    torchs = case.plain or case.forward
    runs: dict[str, Callable[[], Any]] = {"ours": partial(case.ours, inputs)}
    runs["eager"] = partial(differentiate, torchs, inputs, case.leaves)
    if options.compile:
        runs["compiled"] = partial(differentiate, torch.compile(torchs), inputs, case.leaves)
    runs |= others(case, inputs)
    seconds = measure(runs, options.repeats, device)
    ours = seconds.pop("ours")
    speed = case.passes * _bytes(inputs) / ours
    ratios = {name: f"{each / ours:.1f}x" for name, each in seconds.items()}
    eager, compiled = ratios.pop("eager"), ratios.pop("compiled", "-")
    rest = ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())
    label = "x".join(map(str, _first(inputs)[0].shape))
    return case.ops[0], label, f"{ours * 1e3:.3f}", f"{speed / 1e9:.1f}", f"{speed / copy:.0%}", eager, compiled, rest


def measure(runs: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each, in turn, so that a drift of the machine's speed meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(WARM_UP + repeats):
        for name, call in runs.items():
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in times.items()}


def copy_speed(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    seconds = measure({"copy": lambda: target.copy_(source)}, 10, device)["copy"]
    return 2 * COPY_BYTES[device.type] / seconds


def others(case: Case, inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """The layer norms of Liger Kernel and Apex, where they are installed; both need a GPU."""
    if case.ops[0] != "layer_norm" or not inputs["x"].is_cuda:
        return {}
    found: dict[str, Callable[[Inputs], tuple[torch.Tensor, ...]]] = {}
    if find_spec("liger_kernel"):
        liger = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply
        found["Liger"] = lambda each: (liger(each["x"], each["weight"], each["beta"], EPS),)
    if find_spec("apex"):
        apex = import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine
        found["Apex"] = lambda each: (apex(each["x"], each["weight"], each["beta"], each["weight"].shape, EPS),)
    return {name: partial(differentiate, forward, inputs, case.leaves) for name, forward in found.items()}


def _first(inputs: Inputs) -> list[torch.Tensor]:
    first = next(iter(inputs.values()))
    return first if isinstance(first, list) else [first]


def _bytes(inputs: Inputs) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _first(inputs))
