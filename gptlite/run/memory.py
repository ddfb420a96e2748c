"""The banner's line on the memory that the planner predicts for a run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from gptlite.config import Config
from gptlite.config.batch import check_world
from gptlite.errors import ConfigError, first_line
from gptlite.invocation import command
from gptlite.metrics.console import format_bytes
from gptlite.models.spec import spec_of
from gptlite.ops.config import Attention
from gptlite.ops.select import select_ops
from gptlite.parallelism.layout import Layout
from gptlite.parallelism.memory import paper_bytes_a_parameter
from gptlite.plan.capacity import GIB, least_bytes
from gptlite.plan.config import ClusterConfig
from gptlite.plan.local import physical_gib
from gptlite.plan.memory import estimate, most
from gptlite.plan.parameters import stages
from gptlite.plan.planning import running, with_planned_vocabulary, workload_of
from gptlite.plan.workload import RankBytes, Workload
from gptlite.precision import Policy, resolve_precision
from gptlite.run.build import Run


def profile_ahead(config: Config, world: int) -> None:
    """Record the profiles that `predicted` needs. Runs on rank 0, before it joins the process group.

    The planner simulates tensor-, context- and expert-parallel ranks in a process group of its own, and a process can
    have only one default process group at a time.
    """
    with suppress(Exception):  # the run itself reports what is wrong with its configuration
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = with_planned_vocabulary(config, lambda _: None)[0]
        ops = select_ops(config.ops, device, documents=config.data.documents)
        policy = resolve_precision(config.precision, device)
        work = planned(config, check_world(config, world), device, policy, ops.attention)
        estimate(work, 0)
        most(work)


def refuse_too_large(config: Config, layout: Layout, ranks: int) -> None:
    """Raise ConfigError if parameters and optimizer state alone exceed the memory of a machine with `ranks` CPU ranks.

    Otherwise the operating system would end the run, or other programs, after minutes of allocation.
    """
    if config.data.unit != "tokens":
        return
    try:
        sized = with_planned_vocabulary(config, lambda _: None)[0]
        state = ranks * least_bytes(workload_of(sized, layout, ClusterConfig(device="cpu"))) / GIB
    except Exception:  # a model that the planner cannot build; the run reports what is wrong with it
        return
    if state > (memory := physical_gib()):
        raise ConfigError(
            f"{spec_of(config.model).label(config.model)} needs {state:,.1f} GiB for parameters and optimizer state on "
            f"this machine, which has {memory:,.1f} GiB of memory; choose a smaller model, or plan a cluster for it: "
            f"{command('plan')} --help"
        )


def predicted(run: Run) -> list[tuple[str, str]]:
    """Return the banner's line on the predicted memory of rank 0, and of the rank that needs the most.

    If the planner cannot profile the model, the line has the reason instead, and the run continues.
    """
    mesh, size = run.mesh, run.state.loader.micro_batch_size
    try:
        work = planned(run.config, mesh.layout, mesh.device, run.policy, run.ops.attention)
        return [("memory", _words(replace(work, micro_batch_size=size)))]
    except Exception as error:  # the model's own code runs with fake tensors, and may fail in any way
        return [("memory", f"n/a: {first_line(error)}")]


def planned(config: Config, layout: Layout, device: torch.device, policy: Policy, attention: Attention) -> Workload:
    """Return the planner's workload for a step of a configuration, whose vocabulary size must be set."""
    work = workload_of(config, layout, ClusterConfig(device=device.type))
    return replace(running(work, config, policy), attention=attention)


def _words(work: Workload) -> str:
    mine, (fullest, taken) = estimate(work, 0), most(work)
    text = ", ".join(_listed(mine))
    if work.layout.fsdp_size > 1:
        state, shards = mine.total - mine.activations, work.layout.size("dp_shard")
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
    return sizes
