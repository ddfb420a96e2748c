"""Line on ZeRO++ that follows the banner of a run."""

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import splits_backward
from gptlite.parallelism.mesh import Mesh
from gptlite.progress import counted, format_bytes
from gptlite.satellites.zeropp.check import options


def zeropp_words(config: ParallelismConfig, mesh: Mesh, micro_batches: int, itemsizes: tuple[int, int]) -> str:
    """Return the options that are on, the nodes, and the bytes that this rank sends in a step; an empty string without
    ZeRO++. `itemsizes`: those of elements in dense gathers and sums. Bytes are left out with schedules that split
    backward passes, whose further gathers `step_bytes` does not count."""
    if not (on := options(config.zeropp)):
        return ""
    from gptlite.satellites.zeropp.reduction import ZeroppReduction  # not in other runs

    assert isinstance(mesh.reduction, ZeroppReduction)
    nodes = mesh.reduction.nodes
    line = f"ZeRO++: {on.replace('parallelism.zeropp.', '')} on {counted(nodes.count, 'node')} of "
    line += counted(nodes.size, "data rank") + (" each" if nodes.count > 1 else "")
    if splits_backward(config):
        return line
    sent = mesh.reduction.step_bytes(micro_batches, *itemsizes)
    inside, across = format_bytes(float(sent.inside)), format_bytes(float(sent.across))
    return f"{line}: this rank sends {inside} per step inside its node, and {across} to other nodes"
