"""Hardware description of a cluster. Bytes and FLOPs are decimal (1 GB/s = 1e9 bytes a second), memory is in GiB."""

from dataclasses import dataclass, field


@dataclass
class LinkConfig:
    """A full-duplex link of one device: GB/s of the data sheet, the share that collectives reach, and latency in
    seconds.

    `shared`: number of devices that share this bandwidth, such as two GPUs on one network card; 1 if each has its own.
    """

    gb_per_second: float = 1.0
    efficiency: float = 1.0
    latency: float = 1e-5
    shared: int = 1


@dataclass
class ClusterConfig:
    """Nodes of identical devices. `peak_tflops` and `matmul_efficiency` are by dtype (fp32, bf16, fp16).

    `matmul_efficiency` is the share of the peak that large products reach (0.7 if a dtype is missing). A product whose
    smallest dim is k reaches k / (k + matmul_half_size) of that rate in the fastest dtype; slower dtypes saturate at
    proportionally smaller dims. `device`: cuda or cpu. `nodes: null` and `devices_per_node: null` take the number that
    this machine has.

    On a CPU `devices_per_node` is the number of cores of a node, and peak, bandwidth and memory are those of the node.
    Its ranks divide them, each computing on its share of the cores, so two ranks together are no faster than one. A
    rank with several cores reaches `thread_efficiency` of their combined speed, since part of a step is
    single-threaded. Ranks beyond the number of cores are time-sliced, and each takes `crowding` times its share of the
    time.
    """

    name: str = "custom"
    device: str = "cuda"
    nodes: int | None = 1
    devices_per_node: int | None = 8
    memory_gib: float = 80.0  # of a device; of the node, shared by its ranks, on a CPU
    reserved_gib: float = 2.0  # of that: taken by the context, the allocator and the libraries
    host_memory_gib: float | None = None  # of a node, for offload; null: unknown, so the search does not offload
    peak_tflops: dict[str, float] = field(default_factory=dict)
    matmul_efficiency: dict[str, float] = field(default_factory=dict)
    matmul_half_size: float = 128.0
    matmul_multiple: int = 1  # full speed needs 16-bit dims that are multiples of it (tensor cores before cuBLAS 11)
    unaligned_share: float = 1.0  # share of that speed that other dims reach
    attention_efficiency: float = 0.5  # share of the peak that attention in one kernel reaches
    attention_tflops: dict[str, float] = field(default_factory=dict)  # by dtype, where it was measured
    memory_gb_per_second: float = 2000.0
    memory_efficiency: float = 0.8
    kernel_seconds: float = 5e-6  # from one op to the next
    intra: LinkConfig = field(default_factory=LinkConfig)  # between devices of a node
    inter: LinkConfig = field(default_factory=LinkConfig)  # between nodes
    overlap: float = 0.8  # share of the data axes' communication that can hide behind compute
    host_link_gb_per_second: float = 25.0  # device to host memory, both directions together; used by offload
    host_memory_gb_per_second: float = 200.0  # of a node, shared by its devices' updates
    disk_gb_per_second: float = 2.0  # of a node, reads and writes together; calibrate measures none of these three
    disk_path: str | None = None  # mount point on each node, for offload=nvme; null: the search does not use it
    disk_gib: float | None = None  # its capacity; null: not checked
    thread_efficiency: float = 1.0
    crowding: float = 1.0
    dollars_per_device_hour: float | None = None
    calibrated: str = ""  # time and machine of the calibration; empty: figures are from data sheets
