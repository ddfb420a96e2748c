"""The hardware a plan is made for. Bytes and FLOPs are decimal (1 GB/s = 1e9 bytes a second), memory is in GiB."""

from dataclasses import dataclass, field


@dataclass
class LinkConfig:
    """What one device can send while it receives as much: GB/s of data sheet, the share of it that collectives reach,
    and seconds until the first byte arrives. `shared`: devices that have this bandwidth together, as two GPUs share a
    network card; 1: each has it to itself."""

    gb_per_second: float = 1.0
    efficiency: float = 1.0
    latency: float = 1e-5
    shared: int = 1


@dataclass
class ClusterConfig:
    """Nodes of equal devices. `peak_tflops` and `matmul_efficiency` are by dtype (fp32, bf16, fp16).

    `matmul_efficiency` is the share of the peak that large products reach (0.7 where a dtype is missing); a product
    whose smallest dim is k reaches k / (k + matmul_half_size) of that in the fastest dtype, and slower ones saturate as
    much earlier. `device`: cuda or cpu. `nodes: null` and `devices_per_node: null` are what is there, for presets
    of this machine.

    On a CPU `devices_per_node` is the cores of a node, and its peak, bandwidth and memory are the node's: its ranks
    divide them, each computing on its part of the cores, so that two ranks are no faster together than one was. A rank
    with several cores reaches `thread_efficiency` of their speed, for not all of a step runs in threads. Ranks beyond
    the cores take turns, and each takes `crowding` times its share of the time.
    """

    name: str = "custom"
    device: str = "cuda"
    nodes: int | None = 1
    devices_per_node: int | None = 8
    memory_gib: float = 80.0  # of a device; of the node, shared by its ranks, on a CPU
    reserved_gib: float = 2.0  # of it, what the context, the allocator and the libraries take
    host_memory_gib: float | None = None  # of a node, for offload; null: not known, so the search leaves offload alone
    peak_tflops: dict[str, float] = field(default_factory=dict)
    matmul_efficiency: dict[str, float] = field(default_factory=dict)
    matmul_half_size: float = 128.0
    matmul_multiple: int = 1  # dims of 16-bit products must be multiples of it, as for tensor cores before cuBLAS 11
    unaligned_share: float = 1.0  # of the speed that the others reach
    attention_efficiency: float = 0.5  # share of the peak that attention in one kernel reaches
    attention_tflops: dict[str, float] = field(default_factory=dict)  # by dtype, where it was measured
    memory_gb_per_second: float = 2000.0
    memory_efficiency: float = 0.8
    kernel_seconds: float = 5e-6  # from one op to the next
    intra: LinkConfig = field(default_factory=LinkConfig)  # between devices of a node
    inter: LinkConfig = field(default_factory=LinkConfig)  # between nodes
    overlap: float = 0.8  # share of the data axes' communication that can hide behind compute
    host_link_gb_per_second: float = 25.0  # between a device and its host's memory, both ways together; of offload
    host_memory_gb_per_second: float = 200.0  # of a node, shared by its devices' updates
    disk_gb_per_second: float = 2.0  # of a node, read and written together; calibrate does not measure these three
    disk_path: str | None = None  # where each node has that disk, for offload=nvme; null: the search leaves it alone
    disk_gib: float | None = None  # what it holds; null: not asked
    thread_efficiency: float = 1.0
    crowding: float = 1.0
    dollars_per_device_hour: float | None = None
    calibrated: str = ""  # when and where the figures were measured; empty: from data sheets
