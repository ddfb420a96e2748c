"""Line on exact sums that follows the banner of a run."""

from gptlite.parallelism.config import ParallelismConfig


def deterministic_words(config: ParallelismConfig) -> str:
    """Return the price of `parallelism.deterministic`; an empty string without it."""
    if not config.deterministic:
        return ""
    return (
        "deterministic: one sample at a time, exact sums of gradients, losses and norms; equal bits for any "
        "number of data ranks (gpt-lite on a CPU: 1.3 to 2.5 times the time of a step, docs/deterministic.md)"
    )
