"""Choice of what replaces FSDP2's sums of gradients in a run."""

from gptlite.config.schema import Config
from gptlite.parallelism.config import Compression
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.zero import storage_device
from gptlite.satellites.compressed.buckets import BucketReduction
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.compressed.gradients import CompressedReduction
from gptlite.satellites.compressed.powersgd import LowRankReduction


def build_reduction(config: Config, mesh: Mesh) -> BucketReduction | None:
    """Return the reduction that the configuration asks for; None for FSDP2's own sums."""
    layout = config.parallelism
    if mesh.fsdp_size == 1:  # nothing is summed
        return None
    if layout.compression is Compression.powersgd:
        return LowRankReduction(mesh, layout.compression_rank, storage_device(mesh, layout), layout.sequence)
    if layout.compression is not Compression.none:
        codec = CODECS[layout.compression.value]
        return CompressedReduction(mesh, codec, storage_device(mesh, layout), layout.sequence)
    return None
