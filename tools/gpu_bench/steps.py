"""part=steps: measured step times of GPT-3 Small and XL in the trainer, beside the planner's predictions."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from real_step import build_step, model_of, run_config
from torch.utils.benchmark import Timer

from gptlite.metrics.devices import device_peak_flops
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import flops_per_token
from gptlite.ops.config import OpsConfig
from gptlite.ops.select import Ops, select_ops
from gptlite.parallelism.mesh import Mesh

from .report import Part, markdown_table

if TYPE_CHECKING:
    from gpu_bench.arguments import Arguments

REPEATS = 10
HEAD = (
    *("model", "precision", "micro-batch", "blocks", "ms a step", "predicted", "tokens/s", "MFU", "launches", "syncs"),
    *("peak GiB", "predicted GiB"),
)


class Cell(NamedTuple):
    """One configuration to measure."""

    size: str
    micro_batch: int
    precision: str = "bf16"
    compile: bool = False

    def __str__(self) -> str:
        blocks = "compiled" if self.compile else "eager"
        return f"{self.size}, {self.precision}, micro-batch {self.micro_batch}, {blocks}"


# The most informative cells come first, as there may not be time for all.
CELLS = (
    Cell("small", 16),
    Cell("xl", 16),
    Cell("xl", 16, "fp8"),
    Cell("xl", 16, "fp8", compile=True),
    Cell("small", 4),
    Cell("small", 4, compile=True),
    Cell("xl", 4),
    Cell("small", 32),
    Cell("small", 16, compile=True),
    Cell("xl", 16, compile=True),
    Cell("small", 16, "bf16+head"),
    Cell("xl", 16, "fp8+head", compile=True),
    Cell("small", 16, "fp8"),
    Cell("xl", 32),
)
TINY = (Cell("tiny", 2), Cell("tiny", 2, "fp8+head"))


def run(part: Part, options: Arguments) -> None:
    """Predict all cells, then measure them in order while there is time."""
    device, cells = torch.device(options.device), TINY if options.size == "tiny" else CELLS
    expected = {cell: predicted(cell) for cell in cells}
    part.text(
        "One step: forward, backward, gradient norm, clipping and AdamW of one micro-batch of whole sequences, by the "
        "trainer's own code; no activation checkpointing, no data loader. Predictions are the planner's for "
        "cluster=h200, made before the measurements. It ignores compilation, and treats fp8 as bf16."
    )
    part.table(
        ("cell", "predicted ms", "predicted tokens/s", "predicted GiB"),
        [
            (cell, ms(each), f"{tokens_of(cell) / each['seconds']:,.0f}", gib(each["memory"]))
            for cell, each in expected.items()
        ],
    )
    rows: list[tuple[str, ...]] = []
    part.table(HEAD, rows)
    ops = select_ops(OpsConfig(), device)
    part.put("ops", list(ops.reasons))
    for index, cell in enumerate(cells):
        part.progress(index, len(cells), str(cell))
        if part.over:
            part.put("not_reached", [str(each) for each in cells[index:]])
            rows.append(row(cell, expected[cell], "not reached in time"))
            break
        result: dict[str, Any] = {}
        note = ""
        try:
            result = measured(cell, device, ops)
        except torch.OutOfMemoryError:  # recorded as a result, to compare with the predicted memory
            note = "out of memory"
            result = {"error": note}
        except Exception as error:
            note = f"failed: {type(error).__name__}"
            part.failed(f"{cell}: {type(error).__name__}: {(str(error).strip() or note).splitlines()[0]}")
        rows.append(row(cell, expected[cell], note, **result))
        part.put(str(cell), {**result, "predicted": expected[cell]})
        if part.failures and "CUDA error" in part.failures[-1]:  # the CUDA context is unusable for further cells
            break
        forget(device)
    part.log(markdown_table(HEAD, rows))


def tokens_of(cell: Cell) -> int:
    """Return the tokens of a step."""
    return cell.micro_batch * model_of(cell.size).sequence_length


def predicted(cell: Cell) -> dict[str, float]:
    """Return the planner's seconds and bytes of the cell on one H200, even if another device is measured."""
    from gptlite.config import load
    from gptlite.ops.config import Attention
    from gptlite.optimizer.config import AdamWConfig
    from gptlite.parallelism.config import ParallelismConfig
    from gptlite.parallelism.layout import Layout
    from gptlite.satellites.plan.cost import predict
    from gptlite.satellites.plan.workload import Workload

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
    prediction = predict(work, load(["cluster=h200"]).cluster)
    return {"seconds": prediction.step_seconds, "memory": prediction.memory.total}


def measured(cell: Cell, device: torch.device, ops: Ops) -> dict[str, Any]:
    """Build the cell's step and measure it. `memory` is the peak of torch's allocator. Raises OutOfMemoryError."""
    cuda, config = device.type == "cuda", model_of(cell.size)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    run = run_config(config, cell.precision, compile=cell.compile)
    step = build_step(run, Mesh(device), cell.micro_batch, ops=ops)
    seconds = step_seconds(step)
    memory = torch.cuda.max_memory_allocated(device) if cuda else 0
    rate = tokens_of(cell) / seconds
    counts = {"launches": launches(step, cuda), "syncs": syncs(step, cuda), "memory": memory}
    return {"seconds": seconds, "tokens_per_second": rate, "mfu": mfu(rate, config, device), **counts}


def step_seconds(step: Callable[[], Any]) -> float:
    """Return the mean seconds of consecutive steps. As in a run, a step may return before the device is done."""
    step()
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return timer.timeit(REPEATS).mean  # runs two untimed steps first


def mfu(rate: float, config: GPTConfig, device: torch.device) -> float | None:
    """Return the MFU of tokens per second; None if the device's peak is unknown."""
    peak = device_peak_flops(device, torch.bfloat16)
    return None if peak is None else rate * flops_per_token(config, config.sequence_length) / peak


def launches(step: Callable[[], Any], cuda: bool) -> int:
    """Return the number of kernels and copies that a step launches on a GPU, or of ops that it calls on a CPU."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        step()
        if cuda:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    return sum(event.device_type == wanted and not event.is_user_annotation for event in profiled.events() or ())


def syncs(step: Callable[[], Any], cuda: bool) -> int:
    """Return how often the host waits for the device in a step, counted by torch's warnings."""
    if not cuda:
        return 0
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught_warnings)


def forget(device: torch.device) -> None:
    """Free the memory of the last measurement."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ms(found: dict[str, Any]) -> str:
    """Return the seconds of a result as milliseconds for a table."""
    return f"{found['seconds'] * 1e3:.1f}"


def gib(size: float) -> str:
    """Return bytes as GiB for a table."""
    return f"{size / 2**30:.1f}"


def row(cell: Cell, expected: dict[str, float], note: str, **result: Any) -> tuple[str, ...]:
    """Return a cell's row of the table; `note` gives the reason if it was not measured."""
    what = (cell.size, cell.precision, str(cell.micro_batch), "compiled" if cell.compile else "eager")
    if note:
        return (*what, note, ms(expected), *[""] * 5, gib(expected["memory"]))
    share = "n/a" if result["mfu"] is None else f"{result['mfu']:.1%}"
    numbers = (f"{result['tokens_per_second']:,.0f}", share, str(result["launches"]), str(result["syncs"]))
    return (*what, ms(result), ms(expected), *numbers, gib(result["memory"]), gib(expected["memory"]))
