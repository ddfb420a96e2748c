"""`bench`: benchmark of the kernels against torch's ops, as medians of interleaved runs.

gptlite kernels bench [device=cpu] [ops=all] [dtype=bfloat16] [compile=true] [repeats=20]

ops: comma-separated names, as in `gptlite kernels test`. The columns "eager" (torch's ops), "compiled" (the same ops
under torch.compile) and "others" (on a GPU, the layer norms of Liger and Apex if installed) are multiples of our time.
GB/s counts the bytes that must be read and written. "of copy" is the fraction of this device's copy bandwidth. On a GPU
the forward and backward passes are timed separately, with events, on rotating buffers larger than its cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from gptlite.errors import ConfigError, did_you_mean
from gptlite.kernels.case import Case, Inputs, Tensors, differentiate, size_of
from gptlite.kernels.cases import CASES, EPS
from gptlite.kernels.check import check_device
from gptlite.kernels.library import Unavailable, load
from gptlite.kernels.tables import table
from gptlite.kernels.timing import Clock, Task, clock_of, measure

DTYPES = ("float32", "bfloat16", "float16")
COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}
ROTATED_BYTES = 200 * 10**6  # several times the L2 cache of an H100 (50 MB) or H200 (60 MB)
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
Forward = Callable[[Inputs], Tensors]


@dataclass
class Options:
    """Command-line options."""

    device: str = "cpu"
    ops: str = "all"
    dtype: str = "bfloat16"
    compile: bool = True
    repeats: int = 20


@dataclass(frozen=True)
class BenchRow:
    """Measurement of an op at one size, in one direction: `forward`, `backward`, or `both` in one call."""

    op: str
    direction: str
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    bytes: float  # bytes that must be read and written
    share_of_copy: float  # fraction of the copy bandwidth
    ratios: dict[str, float] = field(default_factory=dict)  # time of each alternative / our time


def run(options: Options) -> int:
    """Print a line per op, size and direction, and return the exit code. Raises ConfigError for invalid options."""
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
    """Raise ConfigError for invalid options."""
    check_device(options.device)
    if options.dtype not in DTYPES:
        near = did_you_mean(options.dtype, DTYPES)
        raise ConfigError(f"dtype={options.dtype} is not one of {', '.join(DTYPES)}{near}")
    if options.repeats < 1:
        raise ConfigError(f"repeats={options.repeats} measures nothing; give 1 or more")
    _chosen(options)


def rows(options: Options, copy: float | None = None) -> Iterator[BenchRow]:
    """Yield measured rows. The kernels must be loaded. `copy` is the copy bandwidth in bytes/s; None measures it.

    On a GPU each direction is measured separately. If torch.compile or another library fails, its error is printed, and
    the row has no ratio for it. Raises ConfigError for invalid options.
    """
    check(options)
    cuda, clock = options.device == "cuda", clock_of(torch.device(options.device))
    copy = copy or copy_speed(torch.device(options.device))
    for case in _chosen(options):
        for size in case.gpu_sizes if cuda else case.sizes:
            yield from rows_of(case, size, options, copy, clock, apart=cuda)


def copy_speed(device: torch.device) -> float:
    """Measure the bytes per second that a copy reads and writes."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copy = Task(lambda buffers: buffers[1].copy_(buffers[0]))
    seconds = measure({"copy": copy}, [(source, target)], 10, clock_of(device))["copy"]
    return 2 * COPY_BYTES[device.type] / seconds


def _chosen(options: Options) -> list[Case]:
    cases = [case for case in CASES if not case.cpu_only or options.device == "cpu"]
    if options.ops == "all":
        return cases
    names = {case.ops[0]: case for case in cases}
    for name in options.ops.split(","):
        if name not in names:
            raise ConfigError(f"ops={name} is not one of {', '.join(names)}{did_you_mean(name, names)}")
    return [names[name] for name in options.ops.split(",")]


def rows_of(
    case: Case, size: tuple[int, int], options: Options, copy: float, clock: Clock, apart: bool
) -> Iterator[BenchRow]:
    """Yield a row for each direction of a case. With `apart`, directions are timed separately on rotating buffers."""
    torch.manual_seed(0)
    # Several sets of inputs, so that a set has left the GPU's cache when its turn comes again.
    make = partial(case.make, *size, getattr(torch, options.dtype), torch.device(options.device))
    sets = [make()]
    while apart and len(sets) * size_of(sets[0]) < ROTATED_BYTES:
        sets.append(make())
    traffic, (first, *_) = case.traffic(sets[0]), sets[0].values()
    shape = tuple((first[0] if isinstance(first, list) else first).shape)
    for direction in directions(case, apart):
        tasks = {"ours": kernel_task(case, direction), **_others(case, direction, options)}
        seconds = measure(_working(tasks, sets[0]), sets, options.repeats, clock)
        ours = seconds.pop("ours")
        moved = {FORWARD: traffic[0], BACKWARD: traffic[-1], BOTH: sum(traffic)}[direction]
        ratios = {name: each / ours for name, each in seconds.items()}
        yield BenchRow(case.ops[0], direction, shape, options.dtype, ours, moved, moved / ours / copy, ratios)


def directions(case: Case, apart: bool) -> list[str]:
    """Return the directions to time. `apart` separates them if the op has a backward kernel."""
    if case.kernel_backward and apart:
        return [FORWARD, BACKWARD]
    return [BOTH if case.leaves else FORWARD]


def kernel_task(case: Case, direction: str) -> Task:
    """Return the task that runs our kernels for a direction."""
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
    tasks = {"eager": torch_task(torchs, case.leaves, direction)}
    if options.compile:
        torch.compiler.reset()  # otherwise the second size would be compiled with dynamic shapes
        tasks["compiled"] = torch_task(torch.compile(torchs, dynamic=False), case.leaves, direction)
    for name, forward in _libraries(case, options.device).items():
        tasks[name] = torch_task(forward, case.leaves, direction)
    return tasks


def torch_task(forward: Forward, leaves: tuple[str, ...], direction: str) -> Task:
    """Return the task that runs a torch function for a direction. Autograd computes its gradients."""
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
    """Return the layer norms of Liger Kernel and Apex, if installed. Both need a GPU."""
    if case.ops[0] != "layer_norm" or device != "cuda":
        return {}
    forwards: dict[str, Forward] = {}
    if find_spec("liger_kernel"):
        liger = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply
        forwards["Liger"] = lambda each: (liger(each["x"], each["weight"], each["beta"], EPS),)
    if find_spec("apex"):
        apex = import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine
        forwards["Apex"] = lambda each: (apex(each["x"], each["weight"], each["beta"], each["weight"].shape, EPS),)
    return forwards


def _working(tasks: dict[str, Task], inputs: Inputs) -> dict[str, Task]:
    """Run each task once and return those that succeed. Errors are printed; an error of our kernels is raised."""
    working = {}
    for name, task in tasks.items():
        try:
            task.call(task.before(inputs))
            working[name] = task
        except Exception as error:
            if name == "ours":
                raise
            print(f"{name} left out: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    return working


HEADER = ("op", "size", "direction", "ours ms", "GB/s", "of copy", "eager", "compiled", "others")


def cells(row: BenchRow) -> tuple[str, ...]:
    """Return the cells of a row under HEADER."""
    ratios = {name: f"{each:.1f}x" for name, each in row.ratios.items()}
    eager, compiled = ratios.pop("eager", "-"), ratios.pop("compiled", "-")
    rest = ", ".join(f"{name} {ratio}" for name, ratio in ratios.items())
    shape = "x".join(map(str, row.shape))
    speed = f"{row.bytes / row.seconds / 1e9:.1f}"
    share = f"{row.share_of_copy:.0%}"
    return row.op, shape, row.direction, f"{row.seconds * 1e3:.3f}", speed, share, eager, compiled, rest
