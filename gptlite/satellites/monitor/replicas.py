"""Bitwise comparison of parameters that are replicated over ranks. A mismatch, due to a memory fault or a bug, ends the
run."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptlite.errors import RunEnded
from gptlite.parallelism.axes import AXES, EXPERT, Alike, alike
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.collectives import all_reduce, gather_objects
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.tensor import is_cut, of_experts
from gptlite.trainer.observers import Observer, due

if TYPE_CHECKING:
    from gptlite.trainer.state import TrainState

ROW = 256  # 64-bit words that are summed before weighting
MORE = 3  # maximum number of differing parameters to name, including the first


class ReplicasDiffer(RunEnded):
    """Raised when copies of a parameter differ between ranks. `nodes` are those of the ranks that most others disagree
    with; none if there is no majority."""

    advice = (
        ". Nothing was saved, and earlier checkpoints are intact. Resume from one that was saved "
        "before the last check that passed; if the error happens again, use other hardware"
    )

    def __init__(self, message: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.nodes = tuple(nodes)


class ReplicaCheck(Observer):
    """Comparison of the copies of each parameter on all ranks, every `interval` steps; never if it is 0. If the steps
    of data ranks are apart then, after the next exchange. `node` is the name of this rank's node."""

    def __init__(self, interval: int, node: str | None = None) -> None:
        self._interval, self._waits, self._node = interval, False, node

    def reads(self, state: TrainState) -> bool:
        """Return True if a check is due after this step."""
        return due(state.step, self._interval)

    def settled(self, state: TrainState) -> None:
        """Check if it is due. Raises ReplicasDiffer."""
        mesh, now = state.runner.mesh, self._waits or self.reads(state)
        self._waits = now and mesh.reduction is not None and mesh.reduction.apart
        if now and not self._waits:
            check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step, self._node)
            self.passed(state)

    def passed(self, state: TrainState) -> None:
        """Called after a check that has found no difference."""


def check_replicas(
    parameters: Iterable[tuple[str, Tensor]], tied: Sequence[str], mesh: Mesh, step: int, node: str | None = None
) -> None:
    """Compare this rank's parameters with their copies on other ranks. Collective; raises ReplicasDiffer on all ranks.

    All parameters have copies over dp_replicate, those without dims also over dp_shard, those not sharded over tp have
    copies over tp, and those named in `tied` (the same names on all ranks) have copies on the first and the last
    pipeline part. The message names the first parameter that differs, the ranks, and the node and GPU of those that
    most others disagree with. `node` is the name of this rank's node, by default that of the host.
    """
    # Data ranks hold different experts. Each rank's part of the experts is treated as a separate parameter, of which
    # ranks with other experts have no copy.
    mine, degree = (mesh.coordinate(EXPERT), mesh.size(EXPERT))
    entries = [(name, tensor, of_experts(tensor)) for name, tensor in parameters]
    named = [(f"{name} (part {mine} of {degree})" if apart else name, tensor) for name, tensor, apart in entries]
    every = [
        f"{name} (part {part} of {degree})" if apart else name
        for name, _, apart in entries
        for part in range(degree if apart else 1)
    ]
    # Ranks exchange these hashes, not the parameters.
    hashes = torch.stack([fingerprint(local_tensor(tensor).detach()) for _, tensor in named]).to(mesh.device)
    whole = [name for name, tensor in named if not is_cut(tensor)]
    copies: dict[Alike, Sequence[str]] = {"all": every, "uncut": whole, "tied": tied}
    tables = {axis: names for which, names in copies.items() for axis in alike(which)}
    tables["dp_shard"] = [name for name, tensor in named if tensor.ndim == 0]
    differences: dict[tuple[str, str], list[int]] = {}
    for axis, names in tables.items():
        if mesh.size(axis) == 1 or not names:
            continue
        held = {name: [i for i, (own, _) in enumerate(named) if own == name] for name in names}
        for name in _differing(held, hashes, mesh, axis):
            differences[axis, name] = [int(hashes[i]) for i in held[name]]
    any_found = torch.tensor(len(differences), device=mesh.device)
    if all_reduce(any_found, mesh, op="max"):  # ranks without a difference must raise too
        node = platform.node() if node is None else node
        gpu = f", GPU {mesh.device.index}" if mesh.device.type == "cuda" else ""
        by_rank, places = gather_objects(mesh, differences), gather_objects(mesh, (node, gpu))
        wrong = _outvoted(by_rank)
        told = ", ".join(f"rank {rank} on {places[rank][0]}{places[rank][1]}" for rank in wrong or _concerned(by_rank))
        verdict = f"wrong: {told}, by majority" if wrong else f"without a majority, one of them is wrong: {told}"
        nodes = sorted({places[rank][0] for rank in wrong})
        raise ReplicasDiffer(f"{_message(by_rank, mesh, step)}; {verdict}", nodes)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits, int64 [], computed on its device in one pass. Flipping any single bit changes
    it.

    The 64-bit words of each row of ROW words are summed, each row's sum is multiplied by a different odd number, and
    the results are summed, modulo 2^64.
    """
    bits = tensor.contiguous().flatten()
    if tensor.numel() * tensor.element_size() % (8 * ROW) or bits.storage_offset() * bits.element_size() % 8:
        words = 8 * ROW // bits.element_size()
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % words))
    rows = bits.view(torch.int64).view(-1, ROW).sum(1)
    # Odd numbers are invertible modulo 2^64, so any change of the sum of one row changes the hash.
    return (rows * (2 * torch.arange(len(rows), device=rows.device) + 1)).sum()


def _differing(held: dict[str, list[int]], hashes: Tensor, mesh: Mesh, axis: str) -> list[str]:
    """Return the names of parameters whose copies differ along an axis. `held` maps names to indices into `hashes`."""
    least = torch.iinfo(torch.int64).min
    table = torch.full((2, len(held)), least, dtype=torch.int64, device=hashes.device)
    for column, places in enumerate(held.values()):
        if places:
            mine = hashes[places]
            # The bitwise complement reverses the order, so that one max reduction gives both maximum and minimum.
            table[:, column] = torch.stack([mine.max(), (~mine).max()])
    all_reduce(table, mesh, [axis], "max")
    same = table[0] == ~table[1]
    return [name for name, equal in zip(held, same.tolist(), strict=True) if not equal]


def _message(by_rank: list[dict[tuple[str, str], list[int]]], mesh: Mesh, step: int) -> str:
    """Return e.g. `parameter x differs between dp_replicate ranks 0 and 1 (world ranks 0 and 4) after step 200`."""
    first = next(rank for rank, differing in enumerate(by_rank) if differing)
    axis, name = next(iter(by_rank[first]))
    line = [r for r in range(mesh.world_size) if _same_line(mesh, r, first, axis) and (axis, name) in by_rank[r]]
    by_hash: dict[int, list[int]] = {}
    for rank in line:
        for number in by_rank[rank][axis, name]:
            by_hash.setdefault(number, []).append(rank)
    sides = sorted(by_hash.values(), key=lambda ranks: (-len(ranks), ranks))
    places = " and ".join(", ".join(str(mesh.layout.coordinate(rank, axis)) for rank in side) for side in sides)
    ranks = " and ".join(", ".join(map(str, side)) for side in sides)
    others = sorted({other for differing in by_rank for _, other in differing} - {name})
    named = ", ".join([*others[: MORE - 1], *(["..."] if len(others) >= MORE else [])])
    more = f"; {len(others)} more differ{'s' if len(others) == 1 else ''}: {named}" if others else ""
    return f"parameter {name} differs between {axis} ranks {places} (world ranks {ranks}) after step {step}{more}"


def _first_name(by_rank: list[dict[tuple[str, str], list[int]]]) -> str:
    """Return the parameter that the message names."""
    return next(iter(next(filter(None, by_rank))))[1]


def _concerned(by_rank: list[dict[tuple[str, str], list[int]]]) -> list[int]:
    """Return the ranks that hold differing copies of this parameter, along any axis."""
    name = _first_name(by_rank)
    return [rank for rank, differing in enumerate(by_rank) if any(other == name for _, other in differing)]


def _outvoted(by_rank: list[dict[tuple[str, str], list[int]]]) -> list[int]:
    """Return the ranks whose copies of this parameter most others disagree with; none without a majority."""
    name = _first_name(by_rank)
    votes = {
        rank: tuple(next(hashes for (_, other), hashes in by_rank[rank].items() if other == name))
        for rank in _concerned(by_rank)
    }
    (most, count), *others = Counter(votes.values()).most_common(2)
    if others and others[0][1] == count:
        return []
    return [rank for rank, hashes in votes.items() if hashes != most]


def _same_line(mesh: Mesh, rank: int, other: int, axis: str) -> bool:
    """Return True if two ranks have equal coordinates on all axes except `axis`."""
    place = mesh.layout.coordinate
    return all(place(rank, each) == place(other, each) for each in AXES if each != axis)
