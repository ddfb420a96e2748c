"""Draw the bytes that ZeRO++ sends between nodes, with the functions that tests compare with counted bytes.

python tools/plot_zeropp.py [folder=docs/pictures] [nodes=8] [node_size=8]
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from gptlite.config.command_line import run_tool
from gptlite.files import replacing
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.plots.style import FAINT, INK, STYLE, TRAIN, VALIDATION
from gptlite.satellites.zeropp.wire import Sent, Shards

ELEMENTS = 2**20  # of a shard, in one parameter
ITEMSIZE = 2


@dataclass
class Arguments:
    """Command-line arguments."""

    folder: str = "docs/pictures"
    nodes: int = 8
    node_size: int = 8


def volumes(shards: Shards) -> dict[str, list[Sent]]:
    """Return what a rank sends for the forward gather, the backward gather and the gradients, by options.

    Dense messages cross to another node once too, as NCCL's rings do.
    """
    dense, int8 = shards.gather(None, ITEMSIZE), shards.gather(CODECS["int8"], ITEMSIZE)
    copied, int4 = shards.gather_inside(ITEMSIZE), shards.two_hops(CODECS["int4"])
    return {
        "zero=3": [dense, dense, dense],
        "weights=int8": [int8, int8, dense],
        "secondary=true": [dense, copied, dense],
        "gradients=int4": [dense, dense, int4],
        "all three": [int8, copied, int4],
    }


def run(arguments: Arguments) -> None:
    """Draw the picture and print its path."""
    shards = Shards((ELEMENTS,), arguments.nodes, arguments.node_size)
    whole = arguments.nodes * ELEMENTS * ITEMSIZE  # of a rank's share of what its node sends
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.6), layout="constrained")
        axes = figure.subplots()
        for row, parts in enumerate(volumes(shards).values()):
            left = 0.0
            for part, color in zip(parts, (TRAIN, FAINT, VALIDATION), strict=True):
                axes.barh(row, part.across / whole, left=left, color=color, height=0.62)
                left += part.across / whole
            axes.text(left + 0.03, row, f"{left:.2f}", va="center", color=INK)
        names = ("forward gather", "backward gather", "gradients")
        for place, (name, color) in enumerate(zip(names, (TRAIN, FAINT, VALIDATION), strict=True)):
            axes.text(place * 0.85, -0.75, name, color=color, fontweight="bold")
        axes.set_yticks(range(5), list(volumes(shards)))
        axes.set_ylim(4.5, -1.1)
        axes.set_xlim(0, 3)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"bytes that a node sends per step / 16-bit parameters, {arguments.nodes} nodes")
        path = Path(arguments.folder) / "zeropp.png"
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    print(f"wrote {path}")


if __name__ == "__main__":
    run_tool(run, Arguments, __doc__)
