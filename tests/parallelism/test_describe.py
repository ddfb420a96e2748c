"""A layout in words."""

import pytest

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import resolve


@pytest.mark.parametrize(
    ("world", "settings", "words"),
    [
        (1, {}, "one rank"),
        (2, {}, "data 2 (zero 0)"),
        (8, {"tensor": 2, "pipeline": 2, "zero": 1}, "pipeline 2 x data 2 (zero 1) x tensor 2, 1f1b"),
        (4, {"tensor": 4, "sequence": True}, "tensor 4 (sequence)"),
        (8, {"zero": 3, "dp_replicate": 2}, "data 8 (zero 3, 2 copies of 4 shards)"),
        (2, {"zero": 3, "bucket_layers": 2}, "data 2 (zero 3, buckets of 2 layers)"),
        (2, {"pipeline": 2, "schedule": "zbv"}, "pipeline 2, zbv with 2 stages a rank"),
    ],
)
def test_a_layout_is_described_in_words(world, settings, words):
    config = ParallelismConfig(**settings)
    assert resolve(config, world).describe(config) == words
