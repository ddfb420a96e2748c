"""Choice of ZeRO++ for a run."""

from gptlite.config.schema import Config
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.zeropp.check import check_ranks
from gptlite.satellites.zeropp.nodes import build_nodes, ranks_per_machine
from gptlite.satellites.zeropp.reduction import ZeroppReduction


def build_reduction(config: Config, mesh: Mesh) -> ZeroppReduction:
    """Return what the configuration asks for. Collective. Raises ConfigError, on all ranks, for options that make no
    sense with these ranks."""
    zeropp = config.parallelism.zeropp
    check_ranks(zeropp, mesh.size("dp_shard"))
    nodes = build_nodes(mesh, zeropp.node_size or ranks_per_machine(mesh), config.parallelism.timeout_seconds)
    weights, gradients = CODECS.get(zeropp.weights.value), CODECS.get(zeropp.gradients.value)
    return ZeroppReduction(mesh, nodes, weights, gradients, zeropp.secondary)
