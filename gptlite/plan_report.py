"""What `gptlite plan` says and draws of a plan."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from gptlite.files import write_whole
from gptlite.invocation import arguments
from gptlite.invocation import command as written
from gptlite.metrics.console import banner, format_bytes, format_count, format_duration, table
from gptlite.models.gpt.flops import num_parameters
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import num_stages
from gptlite.parallelism.words import layout_words
from gptlite.plan.cost import cost_per_billion_tokens, days_to_train, stage_seconds
from gptlite.plan.offload import file_bytes
from gptlite.plan.pictures import draw_plan, draw_timeline, make_folder
from gptlite.plan.room import rank_memory
from gptlite.plan.search import Candidate, distinct
from gptlite.plan.timeline import Timeline, timeline
from gptlite.planning import Plan, fixed_keys, overrides, train_overrides

HEADINGS = ("#", "layout", "micro", "recompute", "GiB/rank", "s/step", "comm", "bubble", "tok/s", "MFU")
RIGHT = "# micro GiB/rank s/step comm bubble tok/s MFU"


def report(plan: Plan, top: int, tokens: float | None = None) -> str:
    """The banner, the table of the `top` layouts and the command that trains the best."""
    ranked = distinct(plan.found, top)
    best = plan.best
    lines = [
        ("model", f"{plan.config.model.name}: {format_count(num_parameters(best.work.model))} parameters, "
                  f"vocabulary of {best.work.model.vocab_size}{f' (assumed: {plan.assumed})' * bool(plan.assumed)}"),
        ("cluster", _cluster_words(plan)),
        ("batch", f"{best.work.global_batch_size} sequences of {best.work.sequence_length}, {best.work.dtype}"),
        ("looked at", f"{plan.found.tried:,} layouts; of the fastest {len(plan.found.ranked):,} fit"),
        *[("", f"{count:,}: {kind}, e.g. {plan.found.examples[kind]}") for kind, count in plan.found.pruned.items()],
    ]  # fmt: skip
    if offload := _offload_words(plan):
        lines.append(("offload", offload))
    if plan.found.slower:
        lines.append(("", f"{plan.found.slower:,}: slower, not asked whether they fit"))
    if tokens is not None:
        lines.append(("training", _training_words(plan, tokens)))
    rows = table(HEADINGS, [_row(number, each) for number, each in enumerate(ranked, 1)], right=RIGHT, indent="")
    return "\n".join([banner(lines, title="plan"), *rows, "", "train the best with", command(plan)])


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
    limit = rank_memory(plan.cluster, plan.best.work.layout.world_size)
    title = f"{plan.config.model.name} on {_cluster_words(plan)}"
    files = [draw_plan(ranked, [_short(each) for each in ranked], limit, title, folder / "plan.png")]
    if plan.best.work.parallelism.pipeline > 1:
        files.append(draw_timeline(best_timeline(plan), f"{title}: {_short(plan.best)}", folder / "timeline.png"))
    rows = [
        {"overrides": overrides(each.work), "layout": _words(each), "prediction": asdict(each.prediction)}
        for each in ranked
    ]
    vocabulary = {"vocabulary": plan.best.work.model.vocab_size, "vocabulary_assumed": plan.assumed or None}
    whole = {"cluster": asdict(plan.cluster), **vocabulary, "pruned": dict(plan.found.pruned), "layouts": rows}
    text = json.dumps(whole, indent=2)
    write_whole(folder / "plan.json", text + "\n")
    return [*files, folder / "plan.json"]


def best_timeline(plan: Plan) -> Timeline:
    """The passes of the best layout's pipeline, as the cost model times them."""
    work = plan.best.work
    forward, backward, message = stage_seconds(work, plan.cluster)
    assert len(forward) == num_stages(work.parallelism)
    return timeline(work.parallelism, work.micro_batches, forward, backward, message)


def _row(number: int, each: Candidate) -> tuple[str, ...]:
    its = each.prediction
    return (
        str(number),
        _words(each),
        str(each.work.micro_batch_size),
        each.work.parallelism.activation_checkpointing.value,
        f"{its.memory.total / 2**30:.1f}",
        f"{its.step_seconds:.3g}",
        f"{its.communication_seconds / its.step_seconds:.0%}",
        f"{its.bubble_seconds / its.step_seconds:.0%}",
        format_count(its.tokens_per_second),
        "n/a" if its.mfu is None else f"{its.mfu:.1%}",
    )


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
