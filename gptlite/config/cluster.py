"""Hardware description of a cluster. Rates are in decimal units (1 GB/s = 1e9 bytes per second), capacities in GiB."""

from dataclasses import dataclass, field


@dataclass
class LinkConfig:
    """A full-duplex link of one device.

    `gb_per_second` is from the data sheet, `efficiency` is the share of it that collectives reach, `latency` is in
    seconds. `shared` is the number of devices that share the link, such as two GPUs on one network card. Between n
    nodes, collectives and messages are slower by the factor 1 + `congestion` log2(n).
    """

    gb_per_second: float = 1.0
    efficiency: float = 1.0
    latency: float = 1e-5
    shared: int = 1
    congestion: float = 0.0


@dataclass
class ClusterConfig:
    """Nodes of identical devices. `peak_tflops` and `matmul_efficiency` are by dtype (fp32, bf16, fp16, fp8).

    `matmul_efficiency` is the share of the peak that large matrix products reach (0.7 if the dtype is missing). In the
    fastest dtype other than fp8, a product whose smallest dimension is k reaches k / (k + matmul_half_size) of that
    rate. Other dtypes saturate at dimensions in proportion to their peaks. Without a peak for fp8, a run in fp8 is
    planned as in bf16. `device` is cuda or cpu. If `nodes` or `devices_per_node` is null, this machine's number is
    used.

    Fused attention with heads of width w over k keys reaches w / (w + attention_half_width) x k / (k +
    attention_half_length) of `attention_efficiency`. Below `full_power_watts`, at which the efficiencies hold, a limit
    of `power_watts` slows products and attention in proportion to its square root. On n nodes, ranks wait the share
    `straggle` log2(n) of the time of their passes for the slowest one.

    `measured` says when and on what gptlite was measured to give these values, and is empty for values from data
    sheets. Nine of ten published runs of other code on such devices took `published[0]` to `published[1]` of their
    planned time (docs/planner_published.md).

    On a CPU, `devices_per_node` is the number of cores of a node, and peak, bandwidth and memory are those of the
    whole node. The node's ranks divide its cores equally, so two ranks together are no faster than one. A rank with
    several cores reaches `thread_efficiency` of their combined speed, since part of a step is single-threaded. If there
    are more ranks than cores, they are time-sliced, and a rank's slowdown is `crowding` times the ranks per core.
    """

    name: str = "custom"
    device: str = "cuda"
    nodes: int | None = 1
    devices_per_node: int | None = 8
    memory_gib: float = 80.0  # of a device; on a CPU, of the node
    reserved_gib: float = 2.0  # part of a rank's memory that the CUDA context, allocator and libraries use
    host_memory_gib: float | None = None  # of a node, for offload; if null, the search does not offload
    peak_tflops: dict[str, float] = field(default_factory=dict)
    matmul_efficiency: dict[str, float] = field(default_factory=dict)
    matmul_half_size: float = 128.0
    # 16-bit products reach full speed if all dimensions are multiples of it.
    matmul_multiple: int = 1
    unaligned_share: float = 1.0  # share of full speed that other dimensions reach
    attention_efficiency: float = 0.5  # share of the peak that fused attention reaches with wide heads and many keys
    attention_half_width: float = 0.0
    attention_half_length: float = 0.0
    # By dtype, if measured; used instead of attention_efficiency.
    attention_tflops: dict[str, float] = field(default_factory=dict)
    memory_gb_per_second: float = 2000.0
    memory_efficiency: float = 0.8
    unfused: float = 1.0  # times the bytes of our fused ops that the ops between products move
    quantised_bytes: float = 7.0  # moved to quantise an element to fp8: amax 2, rounding 3, transpose 2 (ops/fp8.py)
    kernel_seconds: float = 5e-6  # launch overhead of an op
    power_watts: float | None = None  # limit of a device; null: none below full_power_watts
    full_power_watts: float | None = None
    straggle: float = 0.0
    intra: LinkConfig = field(default_factory=LinkConfig)  # between devices of a node
    inter: LinkConfig = field(default_factory=LinkConfig)  # between nodes
    overlap: float = 0.8  # share of the data axes' communication that can overlap with compute
    # Share of the tensor axis's communication that overlaps, in both passes; null: `overlap` in the backward pass of
    # column-parallel layers, as in gptlite.
    tensor_overlap: float | None = None
    host_link_gb_per_second: float = 25.0  # device to host memory, both directions together; used by offload
    host_memory_gb_per_second: float = 200.0  # of a node, shared by the optimizer updates of its ranks
    # Of a node, reads and writes together. `calibrate` does not measure the host link, host memory and the disk.
    disk_gb_per_second: float = 2.0
    disk_path: str | None = None  # mount point on each node, for offload=nvme; if null, the search does not use it
    disk_gib: float | None = None  # capacity of this disk; null: not checked
    thread_efficiency: float = 1.0
    crowding: float = 1.0
    exclude_slow: float | None = None  # factor at which a node that stays slower than the others leaves an elastic run
    mtbf_hours: float | None = None  # mean time between failures of one node, for the best checkpoint interval
    dollars_per_device_hour: float | None = None
    calibrated: str = ""  # time and machine of the calibration; empty if the figures are from data sheets
    measured: str = ""
    published: list[float] = field(default_factory=list)
