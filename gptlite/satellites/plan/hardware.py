"""Timing model of one rank's ops and collectives on a cluster.

The time of an op is a launch overhead plus the time of its arithmetic or of its memory traffic, whichever is longer (a
roofline model). The time of a collective is that of a ring algorithm's bytes over the slowest link, plus a latency per
hop. Ranks are placed on nodes in order, and the tensor axis varies fastest (see axes.AXES). A group with m ranks on a
node uses the network links of m devices, at the same time as the node's other groups use theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptlite.config.cluster import ClusterConfig, LinkConfig
from gptlite.errors import ConfigError
from gptlite.parallelism.axes import WORLD
from gptlite.parallelism.layout import Layout
from gptlite.satellites.plan.segments import ATTENTION, MATMUL, MOVE, Op
from gptlite.satellites.plan.workload import ACROSS, INSIDE, TURNS, Transfer

EFFICIENCY = 0.7  # of large matrix products, if the cluster has no value for the dtype
FP8 = "fp8"
USES = 2  # of a layer's three products, those that an operand enters, which is quantised once
# Speed grows with the limit to this power. Dynamic power grows with the cube of the clock, as voltage follows it, but
# a third of an H100's power at full speed does not depend on the clock.
POWER = 0.5


@dataclass(frozen=True)
class Device:
    """The device of a rank, for one compute dtype; on a CPU, the rank's share of the cores.

    `peak` is the data sheet's FLOP/s, less what a power limit takes, `bandwidth` the bytes per second that ops reach,
    `kernel` the launch overhead in seconds. `fp8`: the device for linear layers of blocks, if they run in fp8. See
    ClusterConfig for the other fields.
    """

    peak: float
    efficiency: float
    half_size: float
    attention: float  # FLOP/s of fused attention
    bandwidth: float
    kernel: float
    itemsize: int
    multiple: int = 1
    unaligned: float = 1.0
    half_width: float = 0.0
    half_length: float = 0.0
    unfused: float = 1.0
    quantised: float = 0.0
    fp8: Device | None = None

    def seconds(self, op: Op) -> float:
        """Return the seconds of one op."""
        arithmetic = 0.0
        if op.kind == MATMUL:
            arithmetic = op.flops / self.rate(op.rows, op.inner, op.columns)
        elif op.kind == ATTENTION:
            arithmetic = op.flops / self.attention_rate(op.inner, op.columns)
        moved = op.moved * self.unfused if op.kind == MOVE else op.moved
        return max(arithmetic, moved / self.bandwidth) + self.kernel

    def block_seconds(self, op: Op) -> float:
        """Return the seconds of one op of a block, in which linear layers may run in fp8."""
        products = 2 * op.rows * op.inner * op.columns
        if self.fp8 is None or op.kind != MATMUL or op.flops > 1.01 * products:  # products of heads are not in fp8
            return self.seconds(op)
        operands = op.rows * op.inner + op.inner * op.columns
        return self.fp8.seconds(op._replace(moved=op.moved - operands)) + self.move(self.quantised * operands / USES, 2)

    def attention_rate(self, width: float, keys: float) -> float:
        """Return the FLOP/s of fused attention. A width, or a number of keys, of 0 is unknown and costs nothing."""
        wide = width / (width + self.half_width) if width else 1.0
        return self.attention * wide * (keys / (keys + self.half_length) if keys else 1.0)

    def rate(self, rows: float, inner: float, columns: float) -> float:
        """Return the FLOP/s of products [rows, inner] x [inner, columns]."""
        smallest = min(rows, inner, columns)
        aligned = self.itemsize == 4 or not any(dim % self.multiple for dim in (rows, inner, columns))
        # A slower unit saturates at smaller products, so the half-size is scaled by the same share.
        share = 1.0 if aligned else self.unaligned
        return self.peak * self.efficiency * share * smallest / (smallest + self.half_size * share)

    def move(self, moved: float, ops: float = 1) -> float:
        """Return the seconds of `ops` pointwise ops that together read and write `moved` bytes."""
        return moved / self.bandwidth + ops * self.kernel


def device_of(cluster: ClusterConfig, dtype: str, world: int, fp8: bool = False) -> Device:
    """Return the device of each of `world` ranks. `fp8`: linear layers of blocks run in fp8, if the cluster has a peak
    for it. Raises ConfigError if the cluster has no peak for the dtype."""
    if dtype not in cluster.peak_tflops:
        known = ", ".join(cluster.peak_tflops) or "nothing"
        raise ConfigError(
            f"cluster.peak_tflops has no value for {dtype} (it has {known}); "
            f"give +cluster.peak_tflops.{dtype}=..., or another precision"
        )
    part = rank_share(cluster, world)
    clock = power_share(cluster)
    peak = cluster.peak_tflops[dtype] * 1e12 * part * clock
    measured = cluster.attention_tflops.get(dtype)
    attention = peak * cluster.attention_efficiency if measured is None else measured * 1e12 * part * clock
    fastest = max(
        tflops for name, tflops in cluster.peak_tflops.items() if name != FP8 or len(cluster.peak_tflops) == 1
    )
    return Device(
        peak=peak,
        efficiency=cluster.matmul_efficiency.get(dtype, EFFICIENCY),
        # The cluster's value is for the fastest dtype but fp8; a unit saturates at products in proportion to its peak.
        half_size=cluster.matmul_half_size * cluster.peak_tflops[dtype] / fastest,
        attention=attention,
        bandwidth=cluster.memory_gb_per_second * 1e9 * cluster.memory_efficiency * part,
        kernel=cluster.kernel_seconds,
        itemsize=4 if dtype == "fp32" else 2,
        multiple=cluster.matmul_multiple,
        unaligned=cluster.unaligned_share,
        half_width=cluster.attention_half_width,
        half_length=cluster.attention_half_length,
        unfused=cluster.unfused,
        quantised=cluster.quantised_bytes,
        fp8=device_of(cluster, FP8, world) if fp8 and FP8 in cluster.peak_tflops else None,
    )


def power_share(cluster: ClusterConfig) -> float:
    """Return the share of full speed that the power limit leaves to products and attention."""
    if not cluster.power_watts or not cluster.full_power_watts:
        return 1.0
    return min(1.0, cluster.power_watts / cluster.full_power_watts) ** POWER


def ranks_on_node(cluster: ClusterConfig, world: int) -> int:
    """Return the number of ranks on a node: at most one per GPU; on CPUs, an equal share, even if it exceeds the
    cores."""
    if cluster.device == "cpu":
        return -(-world // (cluster.nodes or 1))
    return min(world, cluster.devices_per_node or world)


def rank_share(cluster: ClusterConfig, world: int) -> float:
    """Return the share of `peak_tflops` that a running rank has: 1 on a GPU. On a CPU, each rank gets a whole number of
    cores, at least one."""
    if cluster.device != "cpu":
        return 1.0
    cores = cluster.devices_per_node or 1
    threads = max(1, cores // ranks_on_node(cluster, world))
    return threads / cores * (cluster.thread_efficiency if threads > 1 else 1.0)


def waiting_for_cores(cluster: ClusterConfig, world: int) -> float:
    """Return the slowdown of a rank by time-slicing if a CPU has more ranks than cores; otherwise 1."""
    if cluster.device != "cpu":
        return 1.0
    turns = ranks_on_node(cluster, world) / (cluster.devices_per_node or 1)
    return turns * cluster.crowding if turns > 1 else 1.0


@dataclass(frozen=True)
class AxisPlacement:
    """Placement of one axis' ranks: their number, the number on each node, and the number of nodes."""

    ranks: int
    inside: int
    nodes: int


@dataclass(frozen=True)
class Links:
    """Timing of collectives and messages between the ranks of a layout."""

    cluster: ClusterConfig
    layout: Layout

    def group(self, axis: str, ranks: int = 0) -> AxisPlacement:
        """Return the placement on nodes of the ranks along an axis, or of all ranks for WORLD. `ranks`: the number of
        ranks of INSIDE or ACROSS."""
        layout, node = self.layout, ranks_on_node(self.cluster, self.layout.world_size)
        if axis in (INSIDE, ACROSS):
            stride = layout.stride("dp_shard") * (layout.size("dp_shard") // ranks if axis == ACROSS else 1)
        else:
            ranks, stride = (layout.world_size, 1) if axis == WORLD else (layout.size(axis), layout.stride(axis))
        inside = min(ranks, max(1, node // stride))
        return AxisPlacement(ranks, inside, -(-ranks // inside))

    def seconds(self, transfer: Transfer) -> float:
        """Return the seconds of all collectives of a transfer in sequence; 0 for a receive, as the send is timed."""
        if transfer.ranks < 2 or transfer.kind == "recv":
            return 0.0
        return transfer.count * self.once(transfer.kind, transfer.payload, self.group(transfer.axis, transfer.ranks))

    def once(self, kind: str, payload: float, group: AxisPlacement) -> float:
        """Return the seconds of one collective, or of one message to the group's next rank, of `payload` bytes."""
        inside, between = self.cluster.intra, self.cluster.inter
        crowded = 1 + between.congestion * math.log2(group.nodes)
        if kind not in TURNS:  # a message or a pipelined broadcast sends the whole tensor over the slowest link
            link = between if group.nodes > 1 else inside
            return crowded * payload / self._speed(link) + link.latency
        speed = self._speed(inside) if group.inside > 1 else math.inf
        if group.nodes > 1:
            # The ring is split over the network links of all ranks that the group has on a node.
            speed = min(speed, self._speed(between) * group.inside / crowded)
        share = (group.ranks - 1) / group.ranks
        # All-reduces over many nodes use trees, whose depth is logarithmic in the number of nodes.
        hops = group.nodes - 1 if kind != "all_reduce" else min(group.nodes - 1, math.ceil(math.log2(group.nodes)))
        latency = (group.inside - 1) * inside.latency + hops * between.latency
        return TURNS[kind] * (payload * share / speed + latency)

    def _speed(self, link: LinkConfig) -> float:
        """Return the bytes per second that a device sends over a link."""
        users = min(link.shared, ranks_on_node(self.cluster, self.layout.world_size))
        return link.gb_per_second * 1e9 * link.efficiency / users
