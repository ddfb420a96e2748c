"""What `gptlite plan` says and draws of a plan."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from gptlite.files import write_whole
from gptlite.invocation import arguments
from gptlite.invocation import command as written
from gptlite.metrics.console import banner, format_bytes, format_count, format_duration, table
from gptlite.models.spec import spec_of
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import num_stages
from gptlite.parallelism.words import layout_words
from gptlite.plan.cost import cost_per_billion_tokens, days_to_train, stage_seconds
from gptlite.plan.offload import file_bytes
from gptlite.plan.parameters import num_parameters
from gptlite.plan.pictures import draw_plan, draw_timeline, make_folder
from gptlite.plan.room import MEMORY_ERROR, rank_memory
from gptlite.plan.search import ERROR, Candidate, distinct, equal_seconds, equals
from gptlite.plan.timeline import Timeline, timeline
from gptlite.planning import Plan, fixed_keys, limited, overrides, train_overrides, vocabulary_of

WIDTH = 80
EQUAL = "="  # marks a layout within the planner's error of the fastest
HEADINGS = ("#", "", "s/step", "tok/s", "MFU", "comm", "bubble", "GiB/rank", "micro", "recompute")
RIGHT = "# s/step tok/s MFU comm bubble GiB/rank micro"
INDENT = "    "  # of a layout below its figures


def report(plan: Plan, top: int, tokens: float | None = None) -> str:
    """The banner, the table of the `top` layouts and the command that trains the best."""
    ranked = distinct(plan.found, top)
    best = plan.best
    lines = [
        ("model", f"{_label(plan)}: {format_count(num_parameters(best.work.model))} parameters, "
                  f"vocabulary of {_vocabulary(plan)}{f' (assumed: {plan.assumed})' * bool(plan.assumed)}"),
        ("cluster", _cluster_words(plan)),
        ("batch", f"{best.work.global_batch_size} sequences of {best.work.sequence_length}, {best.work.dtype}"),
        ("looked at", f"{plan.found.tried:,} layouts; of the fastest {len(plan.found.ranked):,} fit"),
        *[("", f"{count:,}: {kind}, e.g. {plan.found.examples[kind]}") for kind, count in plan.found.pruned.items()],
        *[("", f"{plan.found.slower:,}: slower, not asked whether they fit")] * bool(plan.found.slower),
    ]  # fmt: skip
    lines += [
        ("equal", f"{_equal_words(plan)}{f'; {EQUAL} marks them' * (len(equals(plan.found)) > 1)}"),
        ("memory", _memory_words(plan)),
    ]
    if offload := _offload_words(plan):
        lines.append(("offload", offload))
    if tokens is not None:
        lines.append(("training", _training_words(plan, tokens)))
    shown = [banner(lines, title="plan", width=WIDTH), *_table(ranked, plan), "", "train the best with", command(plan)]
    return "\n".join(shown)


def command(plan: Plan) -> str:
    """The command line that trains the best layout."""
    words = train_overrides(plan.config.run.overrides, plan.best.work)
    nodes, each = plan.cluster.nodes or 1, plan.cluster.devices_per_node or 1
    start = written("train")
    if nodes > 1:
        start = f"torchrun --nnodes={nodes} --nproc-per-node={each} [--rdzv-...] {shlex.join(arguments('train'))}"
    return f"{start} {shlex.join(words)}"


def simulated(plan: Plan) -> str:
    """The best layout's fullest rank, run with fake tensors: its memory and what it sends, exactly."""
    from gptlite.plan.simulate import simulate

    work, pp_rank = plan.best.work, plan.best.prediction.memory_rank
    rank = pp_rank * (work.layout.world_size // work.layout.size("pp"))
    print(f"simulating rank {rank}: seconds, or a minute for a hundred layers", flush=True)
    result = simulate(work, rank)
    parts = ", ".join(f"{key} {format_bytes(value)}" for key, value in asdict(result.peak).items())
    sent: dict[str, int] = {}
    for transfer in result.transfers:
        sent[transfer.axis] = sent.get(transfer.axis, 0) + transfer.wire_bytes
    lines = [
        ("memory", f"{format_bytes(result.peak.total)} at most: {parts}"),
        ("sent a step", ", ".join(f"{axis} {format_bytes(size)}" for axis, size in sent.items()) or "nothing"),
        ("work", f"{format_count(result.flops)} FLOP a step"),
    ]
    return banner(lines, title=f"rank {rank}, simulated")


def write(plan: Plan, folder: Path, top: int) -> list[Path]:
    """plan.png, timeline.png where the best has a pipeline, and plan.json. Raises ConfigError for a bad folder."""
    make_folder(folder)
    ranked = distinct(plan.found, top)
    limit = _limit(plan)
    title = f"{_label(plan)} on {_cluster_words(plan)}"
    notes = [_equal_words(plan), f"memory of the first: {_memory_words(plan)}"]
    names = [_short(each) for each in ranked]
    files = [draw_plan(ranked, names, limit, equal_seconds(plan.found), title, notes, folder / "plan.png")]
    if plan.best.work.parallelism.pipeline > 1:
        files.append(draw_timeline(best_timeline(plan), f"{title}: {_short(plan.best)}", folder / "timeline.png"))
    rows = [
        {
            "overrides": overrides(each.work),
            "layout": _words(each),
            "prediction": asdict(each.prediction),
            "equal": each.prediction.step_seconds <= equal_seconds(plan.found),
        }
        for each in ranked
    ]
    vocabulary = {"vocabulary": _vocabulary(plan), "vocabulary_assumed": plan.assumed or None}
    uncertain = {"error": ERROR, "equal": len(equals(plan.found)), "memory_limit": limit}
    whole = {
        "cluster": asdict(plan.cluster),
        **vocabulary,
        **uncertain,
        "pruned": dict(plan.found.pruned),
        "layouts": rows,
    }
    text = json.dumps(whole, indent=2)
    write_whole(folder / "plan.json", text + "\n")
    return [*files, folder / "plan.json"]


def best_timeline(plan: Plan) -> Timeline:
    """The passes of the best layout's pipeline, as the cost model times them."""
    work = plan.best.work
    forward, backward, message = stage_seconds(work, plan.cluster)
    assert len(forward) == num_stages(work.parallelism)
    return timeline(work.parallelism, work.micro_batches, forward, backward, message)


def _table(ranked: list[Candidate], plan: Plan) -> Iterator[str]:
    """Two lines or more a layout: its figures, then the layout in words."""
    rows = [_row(number, each, equal_seconds(plan.found)) for number, each in enumerate(ranked, 1)]
    header, *figures = table(HEADINGS, rows, right=RIGHT, indent="")
    yield header
    for line, each in zip(figures, ranked, strict=True):
        yield line
        yield textwrap.fill(
            _words(each), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False
        )


def _row(number: int, each: Candidate, equal: float) -> tuple[str, ...]:
    its = each.prediction
    return (
        str(number),
        EQUAL if its.step_seconds <= equal else "",
        f"{its.step_seconds:.3g}",
        format_count(its.tokens_per_second),
        "n/a" if its.mfu is None else f"{its.mfu:.1%}",
        f"{its.communication_seconds / its.step_seconds:.0%}",
        f"{its.bubble_seconds / its.step_seconds:.0%}",
        f"{its.memory.total / 2**30:.1f}",
        str(each.work.micro_batch_size),
        each.work.parallelism.activation_checkpointing.value,
    )


def _equal_words(plan: Plan) -> str:
    """How many layouts the planner cannot tell from the fastest."""
    alike = equals(plan.found)
    kinds = len(distinct(replace(plan.found, ranked=alike), len(alike)))
    if len(alike) == 1:
        return f"none: all others are slower by more than the planner's error of {ERROR:.0%}"
    more = "at least " * (len(alike) == len(plan.found.ranked) and plan.found.slower > 0)
    return (
        f"{more}{len(alike):,} layouts, of {kinds} combinations of degrees and ZeRO stage, are equal within the "
        f"planner's error of {ERROR:.0%}; the first is the fastest predicted"
    )


def _limit(plan: Plan) -> float:
    """Bytes that a rank may take."""
    world = plan.best.work.layout.world_size
    return rank_memory(limited(plan.cluster, plan.config, world), world)


def _memory_words(plan: Plan) -> str:
    """The pick's memory beside what there is."""
    total, limit = plan.best.prediction.memory.total, _limit(plan)
    spare = 1 - total / limit
    words = f"{total / 2**30:.1f} GiB predicted of {limit / 2**30:.1f} on the fullest rank, {spare:.1%} to spare"
    return f"{words}: less than the {MEMORY_ERROR:.0%} that a prediction may be off" if spare < MEMORY_ERROR else words


def _label(plan: Plan) -> str:
    return spec_of(plan.config.model).label(plan.config.model)


def _vocabulary(plan: Plan) -> int | None:
    return vocabulary_of(plan.best.work.model)


def _words(each: Candidate) -> str:
    return layout_words(each.work.parallelism, each.work.layout)


def _short(each: Candidate) -> str:
    return each.words.replace(" with ", ", ")


def _cluster_words(plan: Plan) -> str:
    cluster = plan.cluster
    each, nodes = cluster.devices_per_node or 1, cluster.nodes or 1
    what = "cores" if cluster.device == "cpu" else "GPUs"
    source = f", measured {cluster.calibrated}" if cluster.calibrated else ""
    return f"{cluster.name}: {nodes} x {each} {what} of {cluster.memory_gib:.0f} GiB{source}"


def _offload_words(plan: Plan) -> str:
    """What all layouts of the plan keep elsewhere, and how much; empty where none does."""
    its, best = plan.best.work.parallelism, plan.best.prediction.memory
    if its.offload is Offload.none:
        return ""
    host = [f"{format_bytes(best.host)} of its host's memory for a rank of the best"] if best.host else []
    state = file_bytes(plan.best.work, plan.best.prediction.memory_rank)
    disk = [f"{format_bytes(state)} in {its.offload_path}"] if state else []
    given = "" if "offload" in fixed_keys(plan.config) else ", for nothing fits without"
    return f"{its.offload.value}{given}: {', '.join(host + disk) or 'in the memory of this machine'}"


def _training_words(plan: Plan, tokens: float) -> str:
    words = f"{format_count(tokens)} tokens in {format_duration(86400 * days_to_train(tokens, plan.best.prediction))}"
    each = cost_per_billion_tokens(plan.best.prediction, plan.cluster, plan.best.work.layout.world_size)
    if each is None:
        return words
    price = plan.cluster.dollars_per_device_hour
    return f"{words}, ${each * tokens / 1e9:,.0f} at ${price:g} a GPU hour"
