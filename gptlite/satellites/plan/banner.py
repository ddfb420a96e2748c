"""The banner's line on the memory that the planner predicts for a run."""

from __future__ import annotations

from dataclasses import replace

import torch

from gptlite.config.batch import check_world
from gptlite.config.cluster import ClusterConfig
from gptlite.config.schema import Config
from gptlite.errors import first_line, without_exit
from gptlite.metrics.console import format_bytes
from gptlite.ops.config import Attention
from gptlite.ops.select import select_ops
from gptlite.parallelism.layout import Layout
from gptlite.precision import Policy, resolve_precision
from gptlite.satellites.monitor.model_state import paper_bytes_a_parameter
from gptlite.satellites.plan.memory import estimate, most
from gptlite.satellites.plan.parameters import stages
from gptlite.satellites.plan.planning import assumed_words, running, with_planned_vocabulary, workload_of
from gptlite.satellites.plan.workload import RankBytes, Workload


def memory_words(config: Config, world: int) -> str:
    """Return the predicted memory of rank 0, and of the rank that needs the most, if the run has `world` ranks.

    If the planner cannot profile the model, return the reason instead. Call it in a process without a process group:
    the planner simulates tensor-, context- and expert-parallel ranks in a group of its own.
    """
    try:
        with without_exit():
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            config, assumed = with_planned_vocabulary(config, lambda _: None)
            ops = select_ops(config.ops, device, documents=config.data.documents)
            policy = resolve_precision(config.precision, device)
            work = planned(config, check_world(config, world), device, policy, ops.attention)
            return _words(work) + assumed_words(config.model, assumed)
    except Exception as error:  # the model's own code runs with fake tensors, and may fail in any way
        return f"n/a: {first_line(error)}"


def planned(config: Config, layout: Layout, device: torch.device, policy: Policy, attention: Attention) -> Workload:
    """Return the planner's workload for a step of a configuration, whose vocabulary size must be set."""
    work = workload_of(config, layout, ClusterConfig(device=device.type))
    return replace(running(work, config, policy), attention=attention)


def _words(work: Workload) -> str:
    mine, (fullest, taken) = estimate(work, 0), most(work)
    text = ", ".join(_listed(mine))
    if work.layout.fsdp_size > 1:
        state, shards = mine.total - mine.activations - mine.compression, work.layout.size("dp_shard")
        each = state / max(1, sum(stage.sharded(1) for stage in stages(work, 0)))
        paper = paper_bytes_a_parameter(work.parallelism.zero, shards, work.gather_item)
        text += f"; {each:.4g} bytes of model state per parameter ({paper:.4g} in the ZeRO paper)"
    if work.layout.world_size > 1:
        stage = f", of pipeline rank {fullest}" if work.layout.size("pp") > 1 else ""
        text = f"rank 0: {text}; maximum: {format_bytes(taken.total)}{stage}"
    return text


def _listed(memory: RankBytes) -> list[str]:
    """Return the parts of a rank's memory, e.g. `parameters 16.3 MiB`, with a remark if gradients take 0 bytes."""
    names = ("parameters", "gradients", "optimizer", "activations")
    sizes = [f"{name} {format_bytes(getattr(memory, name))}" for name in names]
    if memory.gradients == 0:
        sizes[1] += " (reduced and freed after each block)"
    return [*sizes, f"compression {format_bytes(memory.compression)}"] if memory.compression else sizes
