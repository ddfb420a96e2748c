"""part=steps: the trainer's step of GPT-3 Small and XL, beside what the planner predicted of it beforehand."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from gptlite.metrics.devices import device_peak_flops
from gptlite.models.gpt.flops import flops_per_token
from gptlite.ops.config import OpsConfig
from gptlite.ops.select import Ops, select_ops
from gptlite.precision import Precision, PrecisionConfig, resolve_precision

from .real_step import Taken, build_step, model_of
from .report import Part

WARM_UP, REPEATS = 3, 10
HEAD = (
    *("model", "precision", "micro-batch", "blocks", "ms a step", "predicted", "tokens/s", "MFU", "launches", "syncs"),
    *("peak GiB", "predicted GiB"),
)


@dataclass(frozen=True)
class Cell:
    """One configuration to measure."""

    size: str
    micro_batch: int
    precision: str = "bf16"
    compile: bool = False

    @property
    def words(self) -> str:
        """For a line of progress."""
        blocks = "compiled" if self.compile else "eager"
        return f"{self.size}, {self.precision}, micro-batch {self.micro_batch}, {blocks}"


# The most informative first: what is not reached in the time is missed least.
CELLS = (
    Cell("small", 16),
    Cell("xl", 16),
    Cell("small", 16, compile=True),
    Cell("xl", 16, compile=True),
    Cell("xl", 16, "fp8"),
    Cell("small", 32),
    Cell("small", 4),
    Cell("xl", 4),
    Cell("xl", 16, "fp8", compile=True),
    Cell("small", 16, "fp8"),
    Cell("small", 4, compile=True),
    Cell("xl", 32),
)
TINY = (Cell("tiny", 2), Cell("tiny", 2, "fp8"))


@dataclass(frozen=True)
class Expected:
    """What the planner says of a cell on cluster=h200, whichever device it is then measured on."""

    seconds: float
    memory: int


@dataclass
class Measured:
    """One cell's result; `memory` is the most that torch's allocator held, 0 on a CPU."""

    seconds: float
    tokens_per_second: float
    mfu: float | None
    launches: int
    syncs: int
    memory: int


def run(part: Part, device: torch.device, tiny: bool) -> None:
    """Predicts all cells, then measures them in order until the time is over."""
    cells = TINY if tiny else CELLS
    expected = {cell: predicted(cell) for cell in cells}
    part.text(
        "One step: forward, backward, gradient norm, clipping and AdamW of one micro-batch of whole sequences, by the "
        "trainer's own code; no activation checkpointing, no data loader. Predictions are the planner's for "
        "cluster=h200, made before anything was measured; it knows no compiled blocks, and takes fp8 for bf16."
    )
    part.table(
        ("cell", "predicted ms", "predicted tokens/s", "predicted GiB"),
        [(cell.words, *_numbers(expected[cell], tokens_of(cell))) for cell in cells],
    )
    part.table(HEAD, [])
    rows: list[tuple[str, ...]] = []
    ops = select_ops(OpsConfig(), device)
    part.put("ops", list(ops.reasons))
    for index, cell in enumerate(cells):
        part.progress(index, len(cells), cell.words)
        if part.deadline.over:
            part.put("not_reached", [each.words for each in cells[index:]])
            rows.append(_row(cell, "not reached in time", expected[cell]))
            break
        try:
            found = measured(cell, device, ops)
        except torch.OutOfMemoryError:  # a result: the prediction stands beside it
            rows.append(_row(cell, "out of memory", expected[cell]))
            part.put(cell.words, {"error": "out of memory", "predicted": asdict(expected[cell])})
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            rows.append(_row(cell, f"failed: {type(error).__name__}", expected[cell]))
            part.record(f"{cell.words}: {type(error).__name__}: {line}")
            if "CUDA error" in line:  # the context is gone: no cell after it would run
                part.replace_table(HEAD, rows)
                break
        else:
            rows.append(_row(cell, found, expected[cell]))
            part.put(cell.words, {**asdict(found), "predicted": asdict(expected[cell])})
        part.replace_table(HEAD, rows)
        _forget(device)
    part.reprint()


def tokens_of(cell: Cell) -> int:
    """Tokens of a step."""
    return cell.micro_batch * model_of(cell.size).sequence_length


def predicted(cell: Cell) -> Expected:
    """The planner's prediction of the cell on one H200."""
    from gptlite.config import load
    from gptlite.ops.config import Attention
    from gptlite.optimizer.config import AdamWConfig
    from gptlite.parallelism.config import ParallelismConfig
    from gptlite.parallelism.layout import Layout
    from gptlite.plan.cost import predict
    from gptlite.plan.workload import Workload

    config = model_of(cell.size)
    work = Workload(
        model=config,
        parallelism=ParallelismConfig(),
        layout=Layout(),
        optimizer=AdamWConfig(),
        global_batch_size=cell.micro_batch,
        micro_batch_size=cell.micro_batch,
        sequence_length=config.sequence_length,
        dtype="bf16",
        attention=Attention.sdpa,
    )
    its = predict(work, load(["cluster=h200"]).cluster)
    return Expected(its.step_seconds, its.memory.total)


def measured(cell: Cell, device: torch.device, ops: Ops) -> Measured:
    """Builds the cell's step and times it. Raises torch.OutOfMemoryError."""
    cuda, config = device.type == "cuda", model_of(cell.size)
    policy = resolve_precision(PrecisionConfig(Precision[cell.precision]), device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    taken = build_step(config, ops, policy, device, cell.micro_batch, compile=cell.compile)
    seconds = step_seconds(taken, device)
    memory = torch.cuda.max_memory_allocated(device) if cuda else 0
    peak = device_peak_flops(device, torch.bfloat16)
    rate = taken.tokens / seconds
    mfu = None if peak is None else rate * flops_per_token(config, config.sequence_length) / peak
    return Measured(seconds, rate, mfu, launches(taken.step, device), syncs(taken.step, device), memory)


def step_seconds(taken: Taken, device: torch.device) -> float:
    """The median of steps in a row, as a run takes them: a step may end on the host before it does on the device."""
    for _ in range(WARM_UP):
        taken.step()
    _wait(device)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        taken.step()
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    _wait(device)
    times[-1] += time.perf_counter() - start
    if device.type != "cuda":
        return median(times)
    return sum(times) / REPEATS  # where the host runs ahead, single steps' times say nothing


def launches(step: Callable[[], Any], device: torch.device) -> int:
    """Kernels and copies that a step starts on a GPU; on a CPU the ops it calls."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    kinds = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=kinds) as profiled:
        step()
        _wait(device)
    wanted = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    return sum(event.device_type == wanted for event in profiled.events() or ())


def syncs(step: Callable[[], Any], device: torch.device) -> int:
    """How often a step's host waits for the device, by torch's own warning."""
    if device.type != "cuda":
        return 0
    with warnings.catch_warnings(record=True) as found, _warning_of_syncs():
        warnings.simplefilter("always")
        step()
    return sum("synchroniz" in str(each.message) for each in found)


@contextmanager
def _warning_of_syncs() -> Any:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _numbers(expected: Expected, tokens: int) -> tuple[str, ...]:
    rate = tokens / expected.seconds
    return f"{expected.seconds * 1e3:.1f}", f"{rate:,.0f}", f"{expected.memory / 2**30:.1f}"


def _row(cell: Cell, found: Measured | str, expected: Expected) -> tuple[str, ...]:
    blocks = "compiled" if cell.compile else "eager"
    what = (cell.size, cell.precision, str(cell.micro_batch), blocks)
    before, memory = f"{expected.seconds * 1e3:.1f}", f"{expected.memory / 2**30:.1f}"
    if isinstance(found, str):
        return (*what, found, before, "", "", "", "", "", memory)
    mfu = "n/a" if found.mfu is None else f"{found.mfu:.1%}"
    rate = f"{found.tokens_per_second:,.0f}"
    most = f"{found.memory / 2**30:.1f}"
    counts = (str(found.launches), str(found.syncs))
    return (*what, f"{found.seconds * 1e3:.1f}", before, rate, mfu, *counts, most, memory)
