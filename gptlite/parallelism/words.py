"""A layout in words, for the banner and for what a checkpoint remembers. No torch here."""

from gptlite.parallelism.axes import every_axis
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import Layout, stages_per_rank

ONE_RANK = "one rank"


def layout_words(config: ParallelismConfig, layout: Layout) -> str:
    """`pipeline 2 x data 2 (zero 1) x tensor 2, 1f1b`: all of a layout that decides how numbers are rounded."""
    if layout.world_size == 1:
        return ONE_RANK
    parts, data = [], f" ({', '.join(_data_words(config, layout))})"
    for axis in every_axis():
        size = layout.data_size if axis.key == "data" else layout.size(axis.name)
        if size == 1 or not axis.label:
            continue
        words = " (sequence)" if axis.key == "tensor" and config.sequence else ""
        if axis.key == "data" or axis.over:
            words, data = data, ""  # with the first that is of data ranks
        parts.append(f"{axis.label} {size}{words}")
    words = " x ".join(parts)
    if layout.size("pp") > 1:
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
