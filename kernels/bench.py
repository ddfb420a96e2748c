"""`bench`: the ops against torch's, median of runs in turn.

gptlite kernels bench [device=cpu] [ops=all] [dtype=bfloat16] [compile=true] [repeats=20]

ops: names, comma-separated, as in `gptlite kernels test`. "eager" is torch's own ops, "compiled" the same under
torch.compile; on a GPU, Liger's and Apex's layer norm too where they are installed: how many times as long as ours they
take. GB/s counts the bytes that must travel; the share is of what a copy on this device reaches. On a GPU the forward
and the backward pass are timed apart, by events, on buffers that rotate over more than its cache holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from gptlite.errors import ConfigError, did_you_mean
from gptlite.kernels.case import Case, Inputs, Tensors, differentiate, size_of
from gptlite.kernels.cases import CASES
from gptlite.kernels.cases_rows import EPS
from gptlite.kernels.check import check_device
from gptlite.kernels.library import Unavailable, load
from gptlite.kernels.tables import table
from gptlite.kernels.timing import Clock, Task, clock_of, measure
from gptlite.progress import Log

DTYPES = ("float32", "bfloat16", "float16")
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
ROTATED_BYTES = 200 * 10**6  # several times the 50 MB of an H100's cache, 60 of an H200's
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
Forward = Callable[[Inputs], Tensors]


@dataclass
class Options:
    """The command line."""

    device: str = "cpu"
    ops: str = "all"
    dtype: str = "bfloat16"
    compile: bool = True
    repeats: int = 20


@dataclass(frozen=True)
class Row:
    """One direction of an op at one size: `forward`, `backward`, or `both` in one call."""

    op: str
    direction: str
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    bytes: float  # that must travel
    share_of_copy: float  # of the bytes a second that a copy moves
    ratios: dict[str, float] = field(default_factory=dict)  # of the seconds others take


def run(options: Options) -> int:
    """Prints a line for each op, size and direction. Raises ConfigError."""
    check(options)
    loaded = load(options.device)
    if isinstance(loaded, Unavailable):
        print(f"no kernels: {loaded.reason}")
        return 1
    copy = copy_speed(torch.device(options.device))
    print(f"{loaded.isa}; {torch.get_num_threads()} threads; a copy moves {copy / 1e9:.1f} GB/s")
    print(table([HEADER, *map(cells, rows(options, copy))]))
    return 0


def check(options: Options) -> None:
    """Raises ConfigError."""
    check_device(options.device)
    if options.dtype not in DTYPES:
        near = did_you_mean(options.dtype, DTYPES)
        raise ConfigError(f"dtype={options.dtype} is not one of {', '.join(DTYPES)}{near}")
    if options.repeats < 1:
        raise ConfigError(f"repeats={options.repeats} measures nothing; give 1 or more")
    _chosen(options)


def rows(options: Options, copy: float | None = None, log: Log = print, clock: Clock | None = None) -> Iterator[Row]:
    """Measures row by row; the kernels are loaded. `copy`, bytes a second, is measured if it is not given.

    What torch.compile or another library fails at is told to `log` and left out of the row. Raises ConfigError.
    """
    check(options)
    device = torch.device(options.device)
    clock = clock or clock_of(device)
    bench = Bench(options, device, copy or copy_speed(device, clock), clock, log, apart=device.type == "cuda")
    for case in _chosen(options):
        for size in case.gpu_sizes if device.type == "cuda" else case.sizes:
            yield from bench.rows(case, size)


def copy_speed(device: torch.device, clock: Clock | None = None) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copy = Task(lambda buffers: buffers[1].copy_(buffers[0]))
    seconds = measure({"copy": copy}, [(source, target)], 10, clock or clock_of(device))["copy"]
    return 2 * COPY_BYTES[device.type] / seconds


def _chosen(options: Options) -> list[Case]:
    cases = [case for case in CASES if not case.cpu_only or options.device == "cpu"]
    if options.ops == "all":
        return cases
    names = {case.ops[0]: case for case in cases}
    for name in options.ops.split(","):
        if name not in names:
            raise ConfigError(f"ops={name} is not there{did_you_mean(name, names)}; there are {', '.join(names)}")
    return [names[name] for name in options.ops.split(",")]


@dataclass(frozen=True)
class Bench:
    """How cases are measured. `apart`: each direction by itself, on sets of buffers that rotate."""

    options: Options
    device: torch.device
    copy: float
    clock: Clock
    log: Log
    apart: bool

    def rows(self, case: Case, size: tuple[int, int]) -> Iterator[Row]:
        """A row for each direction of a case."""
        torch.manual_seed(0)
        make = partial(case.make, *size, getattr(torch, self.options.dtype), self.device)
        sets = [make()]
        while self.apart and len(sets) * size_of(sets[0]) < ROTATED_BYTES:
            sets.append(make())
        for direction in directions(case, self.apart):
            yield self._row(case, direction, sets)

    def _row(self, case: Case, direction: str, sets: list[Inputs]) -> Row:
        tasks = {"ours": kernel_task(case, direction), **_others(case, direction, self.options)}
        seconds = measure(_working(tasks, sets[0], self.log), sets, self.options.repeats, self.clock)
        ours, traffic = seconds.pop("ours"), case.traffic(sets[0])
        moved = {FORWARD: traffic[0], BACKWARD: traffic[-1], BOTH: sum(traffic)}[direction]
        ratios = {name: each / ours for name, each in seconds.items()}
        shape, share = tuple(_first(sets[0]).shape), moved / ours / self.copy
        return Row(case.ops[0], direction, shape, self.options.dtype, ours, moved, share, ratios)


def directions(case: Case, apart: bool) -> list[str]:
    """What is timed: an op that makes its gradient in the forward pass is both in one."""
    if case.kernel_backward and apart:
        return [FORWARD, BACKWARD]
    return [BOTH if case.leaves else FORWARD]


def kernel_task(case: Case, direction: str) -> Task:
    """A direction of our kernels."""
    if direction == FORWARD:
        return Task(case.kernel)
    if direction == BOTH or case.kernel_backward is None:
        return Task(case.ours)
    backward = case.kernel_backward
    return Task(
        lambda ready: backward(*ready), before=lambda inputs: (inputs, case.between(inputs, case.kernel(inputs)))
    )


def _others(case: Case, direction: str, options: Options) -> dict[str, Task]:
    torchs = case.plain or case.forward
    found = {"eager": torch_task(torchs, case.leaves, direction)}
    if options.compile:
        torch.compiler.reset()  # or the second size would be compiled for any size
        found["compiled"] = torch_task(torch.compile(torchs, dynamic=False), case.leaves, direction)
    for name, forward in _libraries(case, options.device).items():
        found[name] = torch_task(forward, case.leaves, direction)
    return found


def torch_task(forward: Forward, leaves: tuple[str, ...], direction: str) -> Task:
    """A direction of a function that autograd differentiates."""
    if not leaves:
        return Task(forward)
    if direction == BOTH:
        return Task(lambda inputs: differentiate(forward, inputs, leaves))

    def before(inputs: Inputs) -> Inputs:
        return inputs | {name: inputs[name].detach().requires_grad_() for name in leaves}

    if direction == FORWARD:
        return Task(forward, before)

    def graph(inputs: Inputs) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        differentiable = before(inputs)
        return forward(differentiable)[0], [differentiable[name] for name in leaves], inputs["dy"]

    return Task(lambda ready: torch.autograd.grad(*ready), graph)


def _libraries(case: Case, device: str) -> dict[str, Forward]:
    """The layer norms of Liger Kernel and Apex, where they are installed; both need a GPU."""
    if case.ops[0] != "layer_norm" or device != "cuda":
        return {}
    found: dict[str, Forward] = {}
    if find_spec("liger_kernel"):
        liger = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply
        found["Liger"] = lambda each: (liger(each["x"], each["weight"], each["beta"], EPS),)
    if find_spec("apex"):
        apex = import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine
        found["Apex"] = lambda each: (apex(each["x"], each["weight"], each["beta"], each["weight"].shape, EPS),)
    return found


def _working(tasks: dict[str, Task], inputs: Inputs, log: Log) -> dict[str, Task]:
    """Those that run once; ours, whose failure is one of the benchmark, whatever it does."""
    found = {}
    for name, task in tasks.items():
        try:
            task.call(task.before(inputs))
        except Exception as error:
            if name == "ours":
                raise
            log(f"{name} left out: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
            continue
        found[name] = task
    return found


HEADER = ("op", "size", "direction", "ours ms", "GB/s", "of copy", "eager", "compiled", "others")


def cells(row: Row) -> tuple[str, ...]:
    """A row of HEADER's table."""
    ratios = {name: f"{each:.1f}x" for name, each in row.ratios.items()}
    eager, compiled = ratios.pop("eager", "-"), ratios.pop("compiled", "-")
    rest = ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())
    shape = "x".join(map(str, row.shape))
    speed = f"{row.bytes / row.seconds / 1e9:.1f}"
    share = f"{row.share_of_copy:.0%}"
    return row.op, shape, row.direction, f"{row.seconds * 1e3:.3f}", speed, share, eager, compiled, rest


def _first(inputs: Inputs) -> torch.Tensor:
    first: Any = next(iter(inputs.values()))
    return first[0] if isinstance(first, list) else first
