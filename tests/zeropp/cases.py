"""Functions that tests run on ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from distributed.cells.steps import built
from numpy.typing import NDArray
from torch import Tensor

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.manifest import read_manifest
from gptlite.config import Config
from gptlite.parallelism import point_to_point
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.point_to_point import PairwiseAllGather
from gptlite.satellites.compressed import sums
from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.buckets import Bucket
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.monitor.replicas import check_replicas
from gptlite.satellites.zeropp.gathers import Gather
from gptlite.satellites.zeropp.nodes import build_nodes, ranks_per_machine
from gptlite.satellites.zeropp.reduction import ZeroppReduction
from gptlite.satellites.zeropp.wire import Sent, Shards
from gptlite.trainer.eval import evaluate_sets
from gptlite.trainer.state import TrainState

SIZES = 300, 7, 256  # of the parameters of a bucket; 2 + 1 + 1 blocks


def digest(tensor: Tensor) -> str:
    """Of the bits."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class Values(Bucket):
    """A bucket without parameters."""

    def __init__(self, rows: int) -> None:
        self.rows, self.sizes = rows, [*map(int, SIZES)]


def values(ranks: int) -> NDArray[np.float64]:
    """What the ranks add, [rank, row, n], in fp32."""
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal((ranks, ranks, sum(SIZES))) * 10.0 ** generator.integers(-3, 2, (ranks, ranks, 1))
    return drawn.astype(np.float32).astype(np.float64)


def scattered(codec: str, node_size: int, layout: dict[str, int]) -> tuple[NDArray, Counter, Sent]:
    """This rank's row of the sum, the bytes it sent to nodes, and those it ought to have sent."""
    mesh = build_mesh(ParallelismConfig(zero=3, **layout))  # type: ignore[arg-type]
    ranks, index = mesh.size("dp_shard"), mesh.coordinate("dp_shard")
    reduction = ZeroppReduction(mesh, build_nodes(mesh, node_size, 60), None, CODECS[codec], False)
    flat = torch.from_numpy(values(ranks)[index]).float().flatten()
    out = torch.empty(sum(SIZES))
    with counting(mesh, node_size) as sent:
        reduction.scatter(Values(ranks), out, flat, mesh.group("dp_shard"))
    planned = Shards(SIZES, ranks // node_size, node_size).two_hops(CODECS[codec])
    mesh.close()
    return out.numpy(), sent, planned


@contextmanager
def counting(mesh: Mesh, node_size: int) -> Iterator[Counter]:
    """Counts the bytes that this rank sends along dp_shard: to ranks of its node, and across."""
    counter: Counter = Counter()

    def count(peer: int, nbytes: int, group: dist.ProcessGroup) -> None:
        rank = dist.get_global_rank(group, peer)
        node = mesh.layout.coordinate(rank, "dp_shard") // node_size
        counter["inside" if node == mesh.coordinate("dp_shard") // node_size else "across"] += nbytes

    exchange, exchange_blocks = point_to_point._exchange, sums._exchange

    def dense(messages: Any, group: dist.ProcessGroup) -> None:
        for peer, out, _ in messages:
            count(peer, out.nbytes, group)
        exchange(messages, group)

    def blocks(messages: dict[int, Tensor], group: dist.ProcessGroup, counted: Any) -> dict[int, Tensor]:
        for peer, message in messages.items():
            count(peer, message.nbytes, group)
        return exchange_blocks(messages, group, counted)

    with mock.patch.object(point_to_point, "_exchange", dense), mock.patch.object(sums, "_exchange", blocks):
        yield counter


@dataclass(frozen=True)
class Gathered:
    """One gather: of which bucket, for the backward pass, the bits, and the largest error over its bound."""

    bucket: int
    backward: bool
    digest: str
    error: float


def gathered(config: Config, steps: int) -> tuple[list[list[Gathered]], dict[str, int]]:
    """The gathers of each step, and the bytes of the copies in the node beside those of what they are copies of."""
    records: list[list[Gathered]] = []
    call = Gather.__call__
    numbers: dict[Gather, int] = {}

    def recorded(
        self: Gather, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        output, shard = output_tensor, input_tensor
        exact = shard.new_empty(output.numel())
        PairwiseAllGather()(exact, shard.clone(), group)
        call(self, output, shard, group, async_op)
        layout = BlockLayout(tuple(self.group.sizes), 256, group.size())
        blocks, errors = layout.pack(exact), layout.pack(output) - layout.pack(exact)
        most = blocks.abs().amax(2, keepdim=True)
        # Half a step of the codes, and in bf16 its rounding of what is decoded.
        bound = most / 127 / 2 + most * torch.finfo(output.dtype).eps
        worst = float((errors.abs() / bound).nan_to_num(0).max())
        number = numbers.setdefault(self, len(numbers))
        records[-1].append(Gathered(number, self.group.in_backward, digest(output), worst))

    with mock.patch.object(Gather, "__call__", recorded), built(config) as (mesh, state, step):
        for _ in range(steps):
            records.append([])
            step(state)
        check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
        copies = sum(each.copy.nbytes for each in numbers if each.copy is not None)
        kept = sum(mesh.size("dp_shard") * sum(each.group.sizes) for each in numbers if each.keeps)
        return records, {"copies": copies, "elements": kept}


@dataclass(frozen=True)
class Trained:
    """Losses and norms, the bytes that the last step sent and ought to have sent, and the bits of the weights."""

    losses: list[tuple[float, float]]
    sent: dict[str, int]
    planned: dict[str, int]
    weights: str


def train(config: Config, steps: int) -> Trained:
    """Trains, and compares the copies of parameters."""
    with built(config) as (mesh, state, step):
        reduction = mesh_reduction(state)
        node_size = reduction.nodes.size if reduction else config.parallelism.zeropp.node_size or mesh.size("dp_shard")
        losses, sent, planned = [], Counter[str](), {}
        if reduction:  # before the first step, as in the line after the banner
            itemsize = 4 if config.precision.dtype.value == "fp32" else 2
            reduced = itemsize if config.precision.reduce.value == "compute" else 4
            total = reduction.step_bytes(state.loader.num_micro_batches, itemsize, reduced)
            planned = {"inside": total.inside, "across": total.across}
        for _ in range(steps):
            with counting(mesh, node_size) as counted:
                result = step(state)
            losses.append((result.loss, result.grad_norm))
            sent = counted
        check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
        weights = digest(torch.cat([local_tensor(each).flatten() for _, each in state.named_parameters()]))
        return Trained(losses, dict(sent), planned, weights)


def mesh_reduction(state: TrainState) -> ZeroppReduction | None:
    """Of a run."""
    reduction = state.runner.mesh.reduction
    assert reduction is None or isinstance(reduction, ZeroppReduction)
    return reduction


def masters(state: TrainState) -> dict[str, str]:
    """The bits of every whole parameter. Collective."""
    return {name: digest(each.full_tensor() if hasattr(each, "full_tensor") else each)  # type: ignore[operator]
            for name, each in state.named_parameters()}  # fmt: skip


def resume(state: TrainState, source: str | None) -> None:
    """From a checkpoint, if there is one. Collective."""
    if source is not None:
        state.load(Path(source), lambda _: None)
        state.load_meta(read_manifest(Path(source)).meta)


def saved(
    config: Config, folder: str, source: str | None, steps: int, more: int
) -> tuple[str, list[tuple[float, float]], dict[str, str], dict[str, str]]:
    """The checkpoint after `steps` steps from `source`, losses and norms of `more` steps after it, and the weights
    that it was loaded with and that it holds."""
    with built(config) as (_, state, step):
        resume(state, source)
        loaded = masters(state)
        for _ in range(steps):
            step(state)
        checkpointer = Checkpointer(CheckpointConfig(async_save=False), Path(folder), state.runner.mesh)
        path = checkpointer.save(state.tensors(), state.meta(), "", None, lambda _: None)
        checkpointer.close()
        held = masters(state)
        results = [step(state) for _ in range(more)]
        return str(path), [(each.loss, each.grad_norm) for each in results], loaded, held


def evaluated(config: Config, source: str, rounded: bool) -> float:
    """The validation loss of a checkpoint in the run's own evaluation; `rounded`: of weights that went through the
    codec."""
    with built(config) as (_, state, _), torch.no_grad():
        resume(state, source)
        for _, parameter in state.named_parameters() if rounded else ():
            local, codec = local_tensor(parameter), CODECS["int8"]
            layout = BlockLayout((local.numel(),), codec.width)
            message = codec.encode(layout.pack(local.flatten())[0])
            local.copy_(layout.unpack(codec.decode(message, layout.blocks)[None])[0].view_as(local))
        result = evaluate_sets(state.model, state.runner, state.loader, None)
        assert result is not None
        return result.nats / result.tokens


def nodes(layout: dict[str, int], node_size: int | None) -> tuple[int, list[int] | None, list[int] | None, bool]:
    """The size of a node, the world ranks of both groups, and whether `close` destroyed those made for nodes."""
    mesh = build_mesh(ParallelismConfig(zero=3, **layout))  # type: ignore[arg-type]
    made = build_nodes(mesh, node_size or ranks_per_machine(mesh), 60)
    groups = [None if each is None else dist.get_process_group_ranks(each) for each in (made.inside, made.across)]
    mesh.close()
    gone = all(not _exists(group) for group in mesh.subgroups)
    return made.size, groups[0], groups[1], gone


def _exists(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
