"""What offload adds to a step: copies between a device and its host, the update in the host's memory, the disk."""

from __future__ import annotations

from gptlite.parallelism.config import Offload
from gptlite.plan.config import ClusterConfig
from gptlite.plan.cost_device import Device, ranks_on_node
from gptlite.plan.offload import moved
from gptlite.plan.workload import Workload


def offloaded(
    work: Workload, cluster: ClusterConfig, device: Device, rank: int, computing: float, update: float
) -> tuple[float, float]:
    """Seconds that copies of a pipeline rank take and nothing hides, and those of its update.

    `computing`: seconds of the step's passes, behind which copies hide as data-parallel communication does. `update`:
    seconds of the update where nothing is offloaded. The ranks of a node share its memory and its disk; of the disk's
    time only what is longer than the update shows, for both go on at once.
    """
    if work.parallelism.offload is Offload.none:
        return 0.0, update
    its, ranks = moved(work, rank), ranks_on_node(cluster, work.layout.world_size)
    copied = its.to_device + its.to_host
    if cluster.device == "cpu":  # from memory to memory
        copies = device.move(2 * copied)
    else:
        seconds = copied / (cluster.host_link_gb_per_second * 1e9)
        copies = seconds - min(cluster.overlap * seconds, computing)
        update *= device.bandwidth / (cluster.host_memory_gb_per_second * 1e9 / ranks)
    disk = (its.read + its.written) / (cluster.disk_gb_per_second * 1e9 / ranks)
    return copies, max(update, disk)
