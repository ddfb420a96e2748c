"""Choice of what replaces FSDP2's sums of gradients in a run."""

from gptlite.config.schema import Config
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.compressed.buckets import BucketReduction


def build_reduction(config: Config, mesh: Mesh) -> BucketReduction | None:
    """Return the reduction that the configuration asks for; None for FSDP2's own sums."""
    if mesh.fsdp_size == 1:  # nothing is summed
        return None
    return None
