"""part=profile: longest kernels of a step, by torch's profiler, and the time of each class beside its lower bound."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from real_step import BATCH, build_step, model_of, run_config
from torch.profiler import DeviceType, ProfilerActivity, profile

from gptlite.parallelism.mesh import Mesh

from .byte_model import CLASSES, Model, class_of, model_of_trace
from .pictures import beside_floor
from .report import Part
from .step_trace import Op, Operand, Trace, trace_step

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

STEPS, WARM_UP, TOP = 3, 3, 20
NAME = 70  # characters of a kernel's name that the table shows
# The profiler records no shapes for lists of tensors. A step's other concatenations are small.
CONCATENATIONS = ("aten::cat", "aten::stack")
# Classes by substrings of a kernel's name, for kernels whose launching op is unknown.
BY_NAME = (
    *(("flash", "attention"), ("fmha", "attention"), ("cross_entropy", "loss"), ("whole_kernel", "loss")),
    *(("adamw", "optimizer"), ("square_sums", "optimizer"), ("gelu", "activation"), ("norm", "norm + residual")),
    *(("gemm", "GEMM block"), ("nvjet", "GEMM block"), ("cutlass", "GEMM block")),
    *(("Memcpy", "copy/cast"), ("Memset", "copy/cast"), ("copy", "copy/cast")),
)


class Slice(NamedTuple):
    """A kernel's time on the device, and the op that launched it with the shapes of its arguments."""

    kernel: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float


def run(part: Part, options: Arguments) -> None:
    """Profile an eager step of GPT-3 Small in bf16."""
    size, device = "tiny" if options.size == "tiny" else "small", torch.device(options.device)
    model, config = model_of_trace(trace_step(size, BATCH[size])), model_of(size)
    slices = slices_of(build_step(run_config(config), Mesh(device), BATCH[size]), device.type == "cuda")
    if not slices:
        part.failed("the profiler recorded nothing on the device")
        return
    total, tokens = sum(each.seconds for each in slices) / STEPS, BATCH[size] * config.sequence_length
    part.text(
        f"{size}, {BATCH[size]} x {config.sequence_length} tokens, bf16, eager: {total * 1e3:.2f} ms a step in "
        f"{len(slices) / STEPS:.0f} kernels, {total * 1e9 / tokens:.0f} ns per token. Floor: see part=model."
    )
    _top(part, slices, model.trace, total)
    _classes(part, slices, model, tokens)


def slices_of(step: Callable[[], Any], cuda: bool) -> list[Slice]:
    """Return the kernels that a GPU ran during STEPS steps. On a CPU, return the ops with their self times."""
    for _ in range(WARM_UP):
        step()
    if cuda:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, record_shapes=True) as recorded:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    events = [event for event in recorded.events() or () if not event.is_user_annotation]  # spans several kernels
    return list(_kernels(events) if cuda else _ops(events))


def _ops(events: Iterable[Any]) -> Iterable[Slice]:
    for event in events:
        if event.self_cpu_time_total > 0 and "::" in event.name:
            yield Slice(event.name, event.name, _shapes(event), event.self_cpu_time_total / 1e6)


def _kernels(events: list[Any]) -> Iterable[Slice]:
    """Yield the kernels that each op launched, and kernels whose op is unknown."""
    attributed: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CPU:
            for kernel in event.kernels:
                attributed[kernel.name] += 1
                yield Slice(kernel.name, event.name, _shapes(event), kernel.duration / 1e6)
    for event in events:
        if event.device_type == DeviceType.CUDA:
            if attributed[event.name]:
                attributed[event.name] -= 1
            else:
                yield Slice(event.name, "", (), event.time_range.elapsed_us() / 1e6)


def _shapes(event: Any) -> tuple[tuple[int, ...], ...]:
    shapes = (each for each in event.input_shapes or () if each and all(isinstance(size, int) for size in each))
    return tuple(tuple(each) for each in shapes)


def group_of(launch: Slice, trace: Trace) -> str:
    """Return the class of a kernel, one of CLASSES."""
    if launch.op in CONCATENATIONS and not launch.shapes:
        return "dQKV copy"
    if launch.op:
        operands = [Operand(list(shape), [1] * len(shape), 2) for shape in launch.shapes]
        return class_of(Op(launch.op.replace("::", ".", 1), "", operands, [], False), trace)
    return next((group for part, group in BY_NAME if part in launch.kernel), "other")


def _top(part: Part, slices: list[Slice], trace: Trace, total: float) -> None:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in slices:
        found[each.kernel, group_of(each, trace)].append(each.seconds)
    longest = sorted(((sum(times), len(times), *key) for key, times in found.items()), reverse=True)
    part.table(
        ("kernel", "class", "calls a step", "us a call", "ms a step", "share"),
        [
            (
                *(kernel[:NAME], group, f"{calls / STEPS:.0f}", f"{seconds * 1e6 / calls:.1f}"),
                *(f"{seconds / STEPS * 1e3:.3f}", f"{seconds / STEPS / total:.1%}"),
            )
            for seconds, calls, kernel, group in longest[:TOP]
        ],
    )
    every = [{"kernel": kernel, "class": group, "seconds": each / STEPS} for each, _, kernel, group in longest]
    part.put("kernels", every)


def _classes(part: Part, slices: list[Slice], model: Model, tokens: int) -> None:
    measured, floor = dict.fromkeys(CLASSES, 0.0), model.by_class()
    for each in slices:
        measured[group_of(each, model.trace)] += each.seconds * 1e9 / STEPS / tokens
    pairs = {name: (measured[name], floor[name]) for name in CLASSES}
    pairs["sum"] = sum(measured.values()), sum(floor.values())
    part.table(
        ("class", "ns per token", "floor", "times the floor"),
        [
            (name, f"{ns:.1f}", f"{least:.1f}", f"{ns / least:.2f}" if least > 0 else "")
            for name, (ns, least) in pairs.items()
        ],
    )
    part.put("classes", {name: {"ns_a_token": measured[name], "floor": floor[name]} for name in CLASSES})
    file = part.folder / "profile.png"
    beside_floor(file, f"{model.trace.model}: kernels of a step by class", measured, floor)
    part.picture(file, "Kernels of a step by class, beside their floor")
