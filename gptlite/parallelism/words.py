"""A layout in words, for the banner and for what a checkpoint remembers. No torch here."""

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import Layout, stages_per_rank

ONE_RANK = "one rank"


def layout_words(config: ParallelismConfig, layout: Layout) -> str:
    """`pipeline 2 x data 2 (zero 1) x tensor 2, 1f1b`: all of a layout that decides how numbers are rounded."""
    if layout.world_size == 1:
        return ONE_RANK
    axes = []
    if (pipeline := layout.size("pp")) > 1:
        axes.append(f"pipeline {pipeline}")
    if layout.data_size > 1:
        axes.append(f"data {layout.data_size} ({', '.join(_data_words(config, layout))})")
    if layout.context > 1:
        words = "" if layout.data_size > 1 else f" ({', '.join(_data_words(config, layout))})"
        axes.append(f"context {layout.context}{words}")
    if (tensor := layout.size("tp")) > 1:
        axes.append(f"tensor {tensor}{' (sequence)' if config.sequence else ''}")
    words = " x ".join(axes)
    if pipeline > 1:
        stages = stages_per_rank(config)
        words += f", {config.schedule}{f' with {stages} stages a rank' if stages > 1 else ''}"
    return words


def _data_words(config: ParallelismConfig, layout: Layout) -> list[str]:
    words = [f"zero {config.zero}"]
    if config.zero and (copies := layout.size("dp_replicate")) > 1:
        words.append(f"{copies} copies of {layout.size('dp_shard')} shards")
    if config.bucket_layers > 1:
        words.append(f"buckets of {config.bucket_layers} layers")
    return words
