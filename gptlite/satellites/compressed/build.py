"""Choice of what replaces FSDP2's sums of gradients in a run."""

from gptlite.config.schema import Config
from gptlite.parallelism.config import Compression
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.zero import storage_device
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.compressed.gradients import CompressedReduction
from gptlite.satellites.compressed.powersgd import LowRankReduction


def build_reduction(config: Config, mesh: Mesh) -> CompressedReduction | None:
    """Return the reduction of a run with parallelism.compression; None if nothing is summed."""
    layout = config.parallelism
    if mesh.fsdp_size == 1:
        return None
    device = storage_device(mesh, layout)
    if layout.compression is Compression.powersgd:
        return LowRankReduction(mesh, layout.compression_rank, device, layout.sequence)
    return CompressedReduction(mesh, CODECS[layout.compression.value], device, layout.sequence)
