"""Models that mix values write on other layouts as in one process."""

from contextlib import closing
from pathlib import Path

import pytest

from distributed.cells.reshard import SAVED, filled
from distributed.cells.reshard_pairs import SINGLE, VALUES, Pair
from distributed.cells.run import GrowingRanks
from distributed.cells.steps import joined
from distributed.test_reshard import config_of
from gptlite.config import Config
from gptlite.models.capabilities import Sampling
from gptlite.parallelism.mesh import build_mesh

CUT = VALUES.source


def written(config: Config, world: int, name: str) -> list[int] | None:
    """Tokens sampled after a prompt, with caches, of a model with drawn values."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        state = filled(config, build_mesh(config.parallelism), SAVED)
        options = {"sampling": Sampling(temperature=4.0), "stop": None, "cache": True}
        with closing(state.loader):
            return list(state.model.spec.generate(state.runner, [3, 1, 4], 20, **options))


@pytest.mark.parametrize("sequence", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_generated_tokens_are_those_of_one_process(growing: GrowingRanks, tmp_path: Path, sequence: str):
    pair = Pair(SINGLE, CUT, "values")
    expected = written(config_of(pair, SINGLE, tmp_path), 1, "one")
    assert len(set(expected or [])) > 3
    config = config_of(pair, CUT, tmp_path, f"parallelism.sequence={sequence}")
    assert growing.run(CUT.world, "distributed.test_values:written", config) == [expected] * CUT.world
