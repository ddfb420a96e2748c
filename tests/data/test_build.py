"""Data of the core: random tokens, refused settings, and the division of global batches."""

import numpy as np
import pytest
import torch

from gptlite.data.build import build_loader, prepare
from gptlite.data.check import check_settings
from gptlite.data.config import DataConfig, SyntheticConfig
from gptlite.errors import ConfigError
from gptlite.parallelism.mesh import Mesh


@pytest.fixture
def settings(tmp_path):
    return {"cache_dir": str(tmp_path / "cache"), "sequence_length": 16}


def test_synthetic_tokens_follow_the_seed_and_nothing_else(settings):
    config = SyntheticConfig(vocab_size=100, num_tokens=5000, **settings)
    a, b, c = (prepare(config, seed) for seed in (1, 1, 2))
    assert np.array_equal(a.sets[0].train, b.sets[0].train)
    assert not np.array_equal(a.sets[0].train, c.sets[0].train)
    assert (len(a.sets[0].train), a.sets[0].train.max(), a.folder) == (5000, 99, None)
    assert a.tokenizer.vocab_size == 100
    assert a.identity != c.identity
    loader = build_loader(config, a, Mesh(torch.device("cpu")), seed=1)
    assert loader.batch(0, 0).tokens.shape == (16, 16)
    assert loader.validation_bytes()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SyntheticConfig(vocab_size=1), "data.vocab_size=1 must be from 2 to 16,777,216"),
        (SyntheticConfig(num_tokens=256), "data.num_tokens=256 is too few for one sequence"),
        (DataConfig(), "no data source is set"),
    ],
)
def test_other_sections_are_refused_too(config, message):
    for refuse in (lambda: check_settings(config), lambda: prepare(config, seed=1)):
        with pytest.raises(ConfigError, match=message):
            refuse()


def test_a_global_batch_that_ranks_cannot_share_is_refused(settings):
    config = SyntheticConfig(num_tokens=5000, global_batch_size=24, micro_batch_size=16, **settings)
    with pytest.raises(ConfigError, match=r"data\.global_batch_size=24 is not divisible by .*=16 x 1"):
        build_loader(config, prepare(config, 1), Mesh(torch.device("cpu")), seed=1)
