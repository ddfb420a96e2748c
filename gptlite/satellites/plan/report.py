"""Output of `gptlite plan`: tables, charts and command lines."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from gptlite.config.cluster import ClusterConfig
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.files import write_whole
from gptlite.invocation import arguments, command
from gptlite.metrics.console import WIDTH, banner, format_bytes, format_count, format_duration, format_parameters, table
from gptlite.models.registry import spec_of
from gptlite.parallelism.config import Offload
from gptlite.progress import counted
from gptlite.satellites.plan.capacity import GIB, MEMORY_ERROR
from gptlite.satellites.plan.compression import is_compressed
from gptlite.satellites.plan.cost import cost_per_billion_tokens, stage_seconds
from gptlite.satellites.plan.in_memory import InMemory
from gptlite.satellites.plan.interval import PlannedSaves
from gptlite.satellites.plan.largest import Largest
from gptlite.satellites.plan.links import DENSE, SPEEDS, LinkCurves
from gptlite.satellites.plan.parameters import num_parameters
from gptlite.satellites.plan.pictures import TIME, Bars, draw_layouts, draw_links, draw_timeline, make_folder
from gptlite.satellites.plan.planning import Plan, fixed_keys, overrides, rank_limit, train_overrides, vocabulary_of
from gptlite.satellites.plan.search import ERROR, Candidate, distinct, equal_seconds, equals
from gptlite.satellites.plan.timeline import timeline
from gptlite.satellites.plan.traffic import file_bytes
from gptlite.satellites.plan.workload import Workload

EQUAL = "="  # marks a layout within the planner's error of the fastest
HEADINGS = ("#", "", "s/step", "{}/s", "MFU", "comm", "bubble", "GiB/rank", "micro", "recompute")
LARGEST_HEADINGS = ("#", "layers", "parameters", "memory/rank", "limit")
RIGHT = "# s/step tok/s samples/s MFU comm bubble GiB/rank micro layers parameters memory/rank limit"  # right-aligned
SHOWN_SPEEDS = (0.1, 1, 10, 100)  # Gb/s
INDENT = "    "  # of a layout's description below its figures


def report(plan: Plan, top: int, tokens: float | None = None) -> str:
    """Return the banner, the table of the `top` layouts and the command that trains the best layout."""
    result, work, spec = plan.found, plan.best.work, spec_of(plan.best.work.model)
    guessed = f" (assumed: {plan.assumed})" if plan.assumed else ""
    lines = [
        ("model", f"{_label(work)}: {format_parameters(num_parameters(work.model), spec.idle_parameters(work.model))}"
                  f"{f', vocabulary of {vocabulary_of(work.model)}{guessed}' if work.sample is None else ''}"),
        ("cluster", _cluster_words(plan.cluster)),
        *[("", words) for words in [unmeasured_words(plan.cluster)] if words],
        ("batch", _batch_words(work)),
        ("searched", f"{result.tried:,} layouts; {len(result.ranked):,} of the fastest fit"),
        *[("", f"{count:,}: {kind}, e.g. {result.examples[kind].partition('; ')[0]}")
          for kind, count in result.pruned.items()],
        *([("", f"{result.slower:,}: slower, so their memory was not computed")] if result.slower else []),
        ("equal", f"{_equal_words(plan)}{f'; {EQUAL} marks them' if len(equals(result)) > 1 else ''}"),
        ("memory", _memory_words(plan)),
        *([("offload", _offload_words(plan))] if work.parallelism.offload is not Offload.none else []),
        *([("in memory", _in_memory_words(plan))] if plan.config.checkpoint.memory_steps else []),
    ]  # fmt: skip
    lines += _saves(plan).lines()
    if tokens is not None:
        lines.append(("training", _training_words(plan, tokens)))
    last = train_command(plan.config, plan.cluster, work)
    text = [banner(lines, title="plan"), *_table(plan, top), "", "train the best with", last]
    if roomy := _roomy(plan):
        words = f"or, as fast within the error and with {_spare(plan, roomy):.0%} of the memory to spare,"
        text += ["", f"{words} train", train_command(plan.config, plan.cluster, roomy.work)]
    return "\n".join(text)


def _spare(plan: Plan, each: Candidate) -> float:
    """Return the share of a rank's memory that a layout is predicted to leave free."""
    return 1 - each.prediction.memory.total / rank_limit(plan.config, plan.cluster, each.work)


def _roomy(plan: Plan) -> Candidate | None:
    """Return the fastest layout of those equal to the best with MEMORY_ERROR to spare; None if the best has that."""
    if _spare(plan, plan.best) >= MEMORY_ERROR:
        return None
    return next((each for each in equals(plan.found) if _spare(plan, each) >= MEMORY_ERROR), None)


def report_largest(config: Config, cluster: ClusterConfig, models: Sequence[Largest], top: int) -> str:
    """Return the banner, the table of the `top` largest models and the command that trains the largest."""
    work, limit = models[0].work, config.trainer.host_memory_limit
    held = f"{limit:g} GiB per rank (trainer.host_memory_limit)" if limit else f"{cluster.memory_gib:.3g} GiB"
    lines = [
        ("model", f"{_label(work)}: {spec_of(work.model).words(work.model)}"),
        ("cluster", f"{_cluster_words(cluster, held)}, {cluster.reserved_gib:g} GiB of it for libraries"),
        ("batch", f"{_batch_words(work)}; recomputation {work.parallelism.activation_checkpointing.value}"),
    ]
    rows = [
        (str(number), str(model.layers), format_count(num_parameters(model.work.model)),
         format_bytes(model.memory.total), format_bytes(model.room))
        for number, model in enumerate(models[:top], 1)
    ]  # fmt: skip
    text = _with_layouts(LARGEST_HEADINGS, rows, [model.work for model in models[:top]])
    last = train_command(config, cluster, work, models[0].override)
    return "\n".join([banner(lines, title="largest model"), *text, "", "train the largest with", last])


def train_command(config: Config, cluster: ClusterConfig, work: Workload, *more: str) -> str:
    """Return the command line that trains a layout, with the overrides `more`; on several nodes, for torchrun."""
    nodes, start = cluster.nodes or 1, command("train")
    if nodes > 1:
        each = f"--nnodes={nodes} --nproc-per-node={cluster.devices_per_node or 1}"
        start = f"torchrun {each} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 {shlex.join(arguments('train'))}"
    return f"{start} {shlex.join(train_overrides(config.run.overrides, work, *more))}"


def simulated(plan: Plan) -> str:
    """Return a banner with the exact memory and communication of the best layout's fullest rank, from a simulation with
    fake tensors. Raises ConfigError for compressed communication."""
    from gptlite.satellites.plan.simulate import simulate

    work, pp_rank = plan.best.work, plan.best.prediction.memory_rank
    if is_compressed(work):
        raise ConfigError(
            "simulate=true simulates dense gathers and sums; leave it out, or parallelism.compression, "
            "parallelism.zeropp and 1-bit optimizers"
        )
    rank = pp_rank * (work.layout.world_size // work.layout.size("pp"))
    print(f"simulating rank {rank}: this takes seconds, about a minute for 100 layers", flush=True)
    result, sent = simulate(work, rank), defaultdict[str, float](float)
    for transfer in result.transfers:
        sent[transfer.axis] += transfer.wire_bytes
    sizes = {key: value for key, value in asdict(result.peak).items() if key != "compression"}
    parts = ", ".join(f"{key} {format_bytes(value)}" for key, value in sizes.items())
    lines = [
        ("memory", f"{format_bytes(result.peak.total)} at most: {parts}"),
        ("sent/step", ", ".join(f"{axis} {format_bytes(size)}" for axis, size in sent.items()) or "nothing"),
        ("work", f"{format_count(result.flops)} FLOP per step"),
    ]
    return banner(lines, title=f"rank {rank}, simulated")


def write(plan: Plan, folder: Path, top: int) -> list[Path]:
    """Write plan.png, plan.json and, if the best layout has a pipeline, timeline.png. Returns their paths.

    Raises ConfigError if the folder cannot be created.
    """
    make_folder(folder)
    ranked, equal, work = distinct(plan.found, top), equal_seconds(plan.found), plan.best.work
    title = f"{_label(work)} on {_cluster_words(plan.cluster)}"
    draw_layouts(
        folder / "plan.png",
        title,
        [_bars(candidate, rank_limit(plan.config, plan.cluster, candidate.work)) for candidate in ranked],
        label="predicted seconds per step; shaded: equal to the fastest within the planner's error",
        shaded=(ranked[0].prediction.step_seconds, equal),
        notes=[_equal_words(plan), f"memory of the fastest: {_memory_words(plan)}"],
    )
    files = [folder / "plan.png"]
    if work.parallelism.pipeline > 1:
        files.append(folder / "timeline.png")
        passes = timeline(work.parallelism, work.micro_batches, *stage_seconds(work, plan.cluster))
        draw_timeline(passes, f"{title}: {_name(plan.best)}", files[-1])
    whole = {
        "cluster": asdict(plan.cluster),
        "vocabulary": vocabulary_of(work.model),
        "vocabulary_assumed": plan.assumed or None,
        "error": ERROR,
        "equal": len(equals(plan.found)),
        "memory_limit": rank_limit(plan.config, plan.cluster, work),
        "pruned": dict(plan.found.pruned),
        "layouts": [
            {
                "overrides": overrides(candidate.work),
                "layout": candidate.work.layout.describe(candidate.work.parallelism),
                "prediction": asdict(candidate.prediction),
                "equal": candidate.prediction.step_seconds <= equal,
            }
            for candidate in ranked
        ],
    }
    files.append(folder / "plan.json")
    write_whole(files[-1], json.dumps(whole, indent=2) + "\n")
    return files


def report_links(links: LinkCurves) -> str:
    """Return the banner, and the table of step times at some link speeds, with the speeds below which compression
    pays."""
    work = links.work
    lines = [
        ("model", f"{_label(work)}: {format_parameters(num_parameters(work.model), 0)}"),
        ("cluster", _cluster_words(links.cluster)),
        ("layout", f"{work.layout.describe(work.parallelism)}, micro-batch {work.micro_batch_size}"),
        ("batch", _batch_words(work)),
        *[("refused", f"{name}: {reason}") for name, reason in links.refused.items()],
    ]
    shown = [min(range(len(SPEEDS)), key=lambda at: abs(SPEEDS[at] - speed)) for speed in SHOWN_SPEEDS]
    rows = []
    for name, curve in links.curves.items():
        gains, below = links.gains(name), links.pays_below(name)
        cells = [f"{curve.seconds[at]:.3g} ({gains[at]:.1f}x)" for at in shown]
        rows.append((name, *cells, "" if name == DENSE else _speed_words(below) if below else "never"))
    headings = ("gradients", *map(_speed_words, SHOWN_SPEEDS), "pays below")
    text = table(headings, rows, right=" ".join(headings[1:]), indent="")
    return "\n".join([banner(lines, title="seconds per step by link speed"), *text])


def write_links(links: LinkCurves, folder: Path) -> Path:
    """Draw links.png, and return its path. Raises ConfigError if the folder cannot be created."""
    make_folder(folder)
    title = f"{_label(links.work)} on {_cluster_words(links.cluster)}"
    draw_links(links, title, folder / "links.png")
    return folder / "links.png"


def _speed_words(speed: float) -> str:
    """Return a speed in Gb/s as e.g. `100Mb/s`."""
    return f"{speed:.3g}Gb/s" if speed >= 1 else f"{speed * 1e3:.3g}Mb/s"


def write_largest(cluster: ClusterConfig, models: Sequence[Largest], folder: Path, top: int) -> Path:
    """Draw the `top` largest models as largest.png, and return its path. Raises ConfigError if the folder cannot be
    created."""
    make_folder(folder)
    shown, nodes = models[:top], cluster.nodes or 1
    draw_layouts(
        folder / "largest.png",
        f"Most layers at the width of {_label(models[0].work)} that fit {cluster.name}, {counted(nodes, 'node')}",
        [
            Bars(
                model.work.layout.describe(model.work.parallelism),
                {"layers": model.layers},
                f"{model.layers}: {format_count(num_parameters(model.work.model))} parameters",
                model.memory,
                model.room,
            )
            for model in shown
        ],
        label="most layers that fit",
    )
    return folder / "largest.png"


def _bars(layout: Candidate, limit: float) -> Bars:
    """Return the bars of a layout in the chart of a plan."""
    each = layout.prediction
    lengths = {part: getattr(each, f"{part}_seconds") for part in TIME}
    label = f"{each.tokens_per_second:,.0f} {_unit(layout.work)}/s, MFU {each.mfu:.0%}"
    return Bars(_name(layout), lengths, label, each.memory, limit)


def _table(plan: Plan, top: int) -> Iterator[str]:
    """Yield the lines of the table of the `top` layouts."""
    ranked, equal = distinct(plan.found, top), equal_seconds(plan.found)
    rows = [_row(number, each, each.prediction.step_seconds <= equal) for number, each in enumerate(ranked, 1)]
    headings = tuple(each.format(_unit(plan.best.work)) for each in HEADINGS)
    return _with_layouts(headings, rows, [each.work for each in ranked])


def _with_layouts(headings: Sequence[str], rows: Sequence[Sequence[str]], works: Sequence[Workload]) -> Iterator[str]:
    """Yield a table's header, then for each row its figures and below them the description of its layout, which would
    make a column too wide for a terminal."""
    header, *figures = table(headings, rows, right=RIGHT, indent="")
    yield header
    for line, work in zip(figures, works, strict=True):
        yield line
        words = work.layout.describe(work.parallelism)
        yield textwrap.fill(words, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)


def _row(number: int, candidate: Candidate, equal: bool) -> tuple[str, ...]:
    prediction = candidate.prediction
    return (
        str(number),
        EQUAL * equal,
        f"{prediction.step_seconds:.3g}",
        format_count(prediction.tokens_per_second),
        f"{prediction.mfu:.1%}",
        f"{prediction.communication_seconds / prediction.step_seconds:.0%}",
        f"{prediction.bubble_seconds / prediction.step_seconds:.0%}",
        f"{prediction.memory.total / GIB:.1f}",
        str(candidate.work.micro_batch_size),
        candidate.work.parallelism.activation_checkpointing.value,
    )


def _equal_words(plan: Plan) -> str:
    """Return the description of how many layouts are equal to the fastest within the planner's error."""
    alike = equals(plan.found)
    kinds = len(distinct(replace(plan.found, ranked=alike), len(alike)))
    if len(alike) == 1:
        return f"none: all others are slower by more than the planner's error of {ERROR:.0%}"
    # If all layouts that fit are equal, slower layouts, whose memory was not computed, may be equal too.
    more = "at least " if len(alike) == len(plan.found.ranked) and plan.found.slower > 0 else ""
    return (
        f"{more}{len(alike):,} layouts, of {kinds} combinations of degrees and ZeRO stage, are equal within the "
        f"planner's error of {ERROR:.0%}; the first is the fastest predicted"
    )


def _memory_words(plan: Plan) -> str:
    """Return the description of the best layout's memory and its limit."""
    total, limit = plan.best.prediction.memory.total, rank_limit(plan.config, plan.cluster, plan.best.work)
    spare = _spare(plan, plan.best)
    words = f"{total / GIB:.1f} GiB predicted of {limit / GIB:.1f} on the fullest rank, {spare:.1%} to spare"
    return f"{words}: less than the prediction's error of {MEMORY_ERROR:.0%}" if spare < MEMORY_ERROR else words


def _saves(plan: Plan) -> PlannedSaves:
    """Return the planned saves of the best layout: parameters and moments in fp32."""
    work, prediction = plan.best.work, plan.best.prediction
    size = 4 * num_parameters(work.model) * (1 + work.optimizer.moments)
    steps, checkpoint = plan.config.trainer.max_steps, plan.config.checkpoint
    ranks = work.layout.world_size
    replicas, in_background = checkpoint.replicas, checkpoint.async_save
    return PlannedSaves(plan.cluster, size, ranks, prediction.step_seconds, steps, replicas, in_background)


def _label(work: Workload) -> str:
    return spec_of(work.model).label(work.model)


def _name(each: Candidate) -> str:
    return each.words.replace(" with ", ", ")


def _batch_words(work: Workload) -> str:
    unit = "samples" if work.sample else f"sequences of {work.sequence_length}"
    return f"{work.global_batch_size} {unit}, {work.dtype}"


def _unit(work: Workload) -> str:
    """Return the unit of throughput in tables: tok or samples."""
    return work.unit.removesuffix("ens")


def _cluster_words(cluster: ClusterConfig, memory: str = "") -> str:
    what = "cores" if cluster.device == "cpu" else "GPUs"
    measured = cluster.calibrated or cluster.measured
    source = f", measured {measured}" if measured and not memory else ""
    held = memory or f"{cluster.memory_gib:.0f} GiB"
    return f"{cluster.name}: {cluster.nodes or 1} x {cluster.devices_per_node or 1} {what} of {held}{source}"


def unmeasured_words(cluster: ClusterConfig) -> str:
    """Return how far a plan may be off for a cluster on which gptlite was never measured, else an empty string."""
    if cluster.measured or cluster.calibrated or cluster.name == "local":
        return ""
    basis = "planned from data sheets, not measured with gptlite"
    if not cluster.published:
        return basis
    low, high = cluster.published
    return f"{basis}; published runs of other code took {low:g} to {high:g} of their planned time"


def _offload_words(plan: Plan) -> str:
    """Return the description of the best layout's offload: its kind, size and place."""
    parallelism, best = plan.best.work.parallelism, plan.best.prediction
    state = file_bytes(plan.best.work, best.memory_rank)
    kept = [f"{format_bytes(best.memory.host)} of host memory per rank"] if best.memory.host else []
    kept += [f"{format_bytes(state)} per rank in {parallelism.offload_path}"] if state else []
    given = "" if "offload" in fixed_keys(plan.config) else ", since no layout fits without it"
    return f"{parallelism.offload.value}{given}: {', '.join(kept) or 'in host memory'}"


def _in_memory_words(plan: Plan) -> str:
    """Return the cost of checkpoints in memory with the best layout."""
    checkpoint, best = plan.config.checkpoint, plan.best
    cost = InMemory.of(best.work, checkpoint.replicas, plan.cluster)
    return cost.words(checkpoint.memory_steps, plan.cluster, best.prediction.step_seconds)


def _training_words(plan: Plan, tokens: float) -> str:
    seconds = tokens / plan.best.prediction.tokens_per_second
    text = f"{format_count(tokens)} {plan.best.work.unit} in {format_duration(seconds)}"
    cost_per_billion = cost_per_billion_tokens(plan.best.prediction, plan.cluster, plan.best.work.layout.world_size)
    if cost_per_billion is None:
        return text
    price = plan.cluster.dollars_per_device_hour
    return f"{text}, ${cost_per_billion * tokens / 1e9:,.0f} at ${price:g} per GPU hour"
