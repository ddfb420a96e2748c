"""Draw the pictures of docs/parallelism.md with the code that training uses: model placement, ZeRO memory, schedules.

python tools/plot_parallelism.py [folder=docs/pictures]
"""

from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from plot_schedules import INK, MUTED, Arguments, save

from gptlite.config.command_line import run_tool
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import SCHEDULES, num_stages, resolve, split_layers, stages_of_rank
from gptlite.satellites.plan.timeline import Timeline, timeline

GRID, EMPTY = "#d9d9d9", "#f6f6f6"
BLUE, ORANGE, GREEN, VIOLET = "#1f5fbf", "#d9822b", "#3d8b5f", "#7a5fb5"


def main(arguments: Arguments) -> None:
    """Draw the pictures and print their paths."""
    for draw in (layouts, zero, pipeline):
        save(draw, arguments)


# Placement of the model: a row of cells per rank, one cell per piece. The filled part is the part that the rank stores.

LAYERS = 4
PIECES = ("embedding", *(f"block {i}" for i in range(LAYERS)), "head")


class Panel(NamedTuple):
    """A layout, with its title and description."""

    title: str
    text: str
    config: ParallelismConfig
    world: int = 2


INTERLEAVED = ParallelismConfig(pipeline=2, schedule="interleaved_1f1b")
ALL_AXES = ParallelismConfig(pipeline=2, tensor=2, zero=3)
HSDP = ParallelismConfig(tensor=2, zero=3, dp_replicate=2)
COPIES = "HSDP: ranks 0 to 3 hold one copy of the model, 4 to 7 another"
PANELS = [
    Panel("data 2, zero 0 to 2", "whole model on every rank, different samples", ParallelismConfig()),
    Panel("data 2, zero 3", "half of each piece, gathered for use", ParallelismConfig(zero=3)),
    Panel("tensor 2", "half of every matrix", ParallelismConfig(tensor=2)),
    Panel("pipeline 2", "consecutive blocks", ParallelismConfig(pipeline=2)),
    Panel("pipeline 2, interleaved_1f1b or zero_bubble", "four parts, every second one on each rank", INTERLEAVED),
    Panel("pipeline 2, zbv", "four parts, placed in a V", ParallelismConfig(pipeline=2, schedule="zbv")),
    Panel("pipeline 2 x data 2 (zero 3) x tensor 2", "each axis shards the result of the previous axes", ALL_AXES, 8),
    Panel("data 4 (zero 3, 2 copies of 2 shards) x tensor 2", COPIES, HSDP, 8),
]


def layouts() -> Figure:
    """Draw, for each layout, the pieces of the model that each rank stores."""
    figure = Figure(figsize=(12, 10.4), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.05, h_pad=0.12))
    grid = figure.subplots(4, 2, height_ratios=[2, 2, 2, 7])
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        draw_panel(axes, panel)
    return figure


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw one layout. Tensor ranks (blue, orange) split cells vertically, and data shards split them horizontally.
    Pipeline ranks hold whole cells."""
    layout = resolve(panel.config, panel.world)
    axes.set(xlim=(0, len(PIECES)), ylim=(panel.world, 0))
    axes.set_xticks([x + 0.5 for x in range(len(PIECES))], PIECES, fontsize=8.5)
    axes.xaxis.set_ticks_position("top")
    axes.tick_params(colors=MUTED, length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=22)
    axes.set_xlabel(panel.text, loc="left", fontsize=9.5, color=MUTED, labelpad=4)
    labels = []
    for rank in range(panel.world):
        place = {axis: layout.coordinate(rank, axis) for axis in ("pp", "dp_shard", "tp")}
        held = pieces_of(panel.config, place["pp"])
        tensor, shard = (place["tp"], layout.size("tp")), (place["dp_shard"], layout.size("dp_shard"))
        for piece in range(len(PIECES)):
            x, y, width, height = piece + 0.06, rank + 0.1, 0.88, 0.8
            axes.add_patch(Rectangle((x, y), width, height, facecolor=EMPTY, edgecolor=GRID, linewidth=0.8))
            if piece in held:
                corner = (x + width * shard[0] / shard[1], y + height * tensor[0] / tensor[1])
                color = (BLUE, ORANGE)[place["tp"]]
                axes.add_patch(Rectangle(corner, width / shard[1], height / tensor[1], facecolor=color))
        samples = "ABCD"[layout.data_rank(rank)]
        labels.append(f"rank {rank}" + (f", samples {samples}" if layout.data_size > 1 else ""))
    axes.set_yticks([rank + 0.5 for rank in range(panel.world)], labels, fontsize=8.5)


def pieces_of(config: ParallelismConfig, pp_rank: int) -> set[int]:
    """Return the indices of PIECES that a pipeline rank holds."""
    stages = num_stages(config)
    layers = split_layers(LAYERS, stages, 1.0, 0.0)
    pieces = [[1 + layer for layer in each] for each in layers]
    pieces[0].append(0)
    pieces[-1].append(1 + LAYERS)
    return {piece for stage in stages_of_rank(config, pp_rank) for piece in pieces[stage]}


# Bytes per parameter of the ZeRO stages.

PARTS = {"gathered copy": VIOLET, "gradients": ORANGE, "fp32 parameters": BLUE, "Adam's moments": GREEN}
DEGREES = (2, 4, 8)


def bytes_of(stage: int, ranks: int, width: int) -> dict[str, float]:
    """Return the bytes per parameter on each of `ranks` ranks, with gradient accumulation. `width`: bytes per element
    of the compute dtype."""
    share = 1 if stage == 0 else ranks
    return {
        "gathered copy": width if stage < 3 else 0,
        "gradients": 4 / (ranks if stage >= 2 else 1),
        "fp32 parameters": 4 / share,
        "Adam's moments": 8 / share,
    }


def zero() -> Figure:
    """Draw the bytes per parameter of each ZeRO stage, in bf16 and fp32, compared with the ZeRO paper."""
    from gptlite.satellites.monitor.model_state import paper_bytes_a_parameter

    figure = Figure(figsize=(11, 4.4), layout=ConstrainedLayoutEngine(wspace=0.04))
    for axes, (dtype, width) in zip(figure.subplots(1, 2, sharey=True), (("bf16", 2), ("fp32", 4)), strict=True):
        ticks, names = [], []
        for stage in range(4):
            for index, ranks in enumerate(DEGREES):
                x, bottom = stage * 4.2 + index, 0.0
                for part, size in bytes_of(stage, ranks, width).items():
                    axes.bar(x, size, bottom=bottom, width=0.82, color=PARTS[part])
                    bottom += size
                axes.text(x, bottom + 0.25, f"{bottom:g}", ha="center", fontsize=8.5, color=INK)
                paper = paper_bytes_a_parameter(stage, ranks, width)
                axes.plot([x - 0.41, x + 0.41], [paper, paper], color=INK, linewidth=1.6)
                ticks.append(x)
                names.append(str(ranks))
            axes.text(stage * 4.2 + 1, -2.6, f"zero {stage}", ha="center", fontsize=10.5, color=INK)
        axes.set_xticks(ticks, names, fontsize=8.5)
        axes.set_title(dtype, loc="left", fontsize=12, fontweight="bold", color=INK)
        axes.set(ylim=(0, 22), yticks=[0, 4, 8, 12, 16, 20])
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, length=0)
        axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("bytes per parameter on each rank", fontsize=10, color=MUTED)
    handles: list[Artist] = [Rectangle((0, 0), 1, 1, facecolor=color) for color in PARTS.values()]
    handles.append(Line2D([], [], color=INK, linewidth=1.6))
    figure.legend(handles, [*PARTS, "ZeRO paper"], loc="outside upper right", ncols=5, frameon=False, fontsize=9.5)
    figure.supxlabel("data-parallel ranks", fontsize=10, color=MUTED)
    return figure


# Pipeline schedules, with the planner's orders of passes. Tests compare these orders with torch's.

RANKS, MICRO_BATCHES = 4, 8
COLORS = {"F": BLUE, "B": ORANGE, "I": ORANGE, "W": GREEN}
LIGHT = {BLUE: "#8fb3e6", ORANGE: "#efc08f", GREEN: "#9cc9ae"}  # colors of a rank's second part


def pipeline() -> Figure:
    """Draw the timelines of all schedules to the same scale."""
    figure = Figure(figsize=(13, 11), layout=ConstrainedLayoutEngine(hspace=0.07))
    lines = {name: timeline_of(ParallelismConfig(pipeline=RANKS, schedule=name)) for name in SCHEDULES}
    end = max(line.seconds for line in lines.values())
    for axes, (name, line) in zip(figure.subplots(len(lines), 1, sharex=True), lines.items(), strict=True):
        draw_timeline(axes, name, line)
        axes.set_xlim(-0.1, end + 0.1)
    handles = [Rectangle((0, 0), 1, 1, facecolor=color) for color in (BLUE, ORANGE, GREEN)]
    labels = ["forward", "backward, or input gradients only", "weight gradients  (light: a rank's second part)"]
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=10)
    figure.supxlabel("time (a backward pass takes twice as long as a forward pass)", fontsize=10, color=MUTED)
    return figure


def timeline_of(config: ParallelismConfig) -> Timeline:
    """Return a schedule's timeline. The time unit is a quarter of the model's forward pass. Messages take no time."""
    stages = num_stages(config)
    return timeline(config, MICRO_BATCHES, [RANKS / stages] * stages, [2 * RANKS / stages] * stages, message=0.0)


def draw_timeline(axes: Axes, name: str, line: Timeline) -> None:
    """Draw a row per rank. Numbers are micro-batches, and light bars are passes of a rank's second part."""
    for event in line.events:
        first = min(each.stage for each in line.of_rank(event.rank))
        color = COLORS[event.kind]
        color = color if event.stage == first else LIGHT[color]
        corner, length = (event.start, event.rank + 0.08), event.end - event.start
        axes.add_patch(Rectangle(corner, length, 0.84, facecolor=color, edgecolor="white", linewidth=0.8))
        if length:
            place = event.start + length / 2, event.rank + 0.52
            ink = INK if color in LIGHT.values() else "white"
            axes.text(*place, str(event.micro_batch), ha="center", va="center", fontsize=7.5, color=ink)
    axes.set(ylim=(RANKS, 0))
    axes.set_yticks([rank + 0.5 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])
    axes.tick_params(colors=MUTED, length=0)
    axes.spines[:].set_visible(False)
    idle = sum(line.bubble(rank) for rank in range(RANKS)) / RANKS
    axes.set_title(f"{name}: {idle:.0%} of the time idle", loc="left", fontsize=11, fontweight="bold", color=INK)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
