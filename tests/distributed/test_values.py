"""Models that mix values write, evaluate and resume on other layouts as in one process."""

from contextlib import closing
from pathlib import Path

import pytest

from distributed.ranks import GrowingRanks
from distributed.reshard_cases import SAVED, filled, joined
from distributed.reshard_pairs import SINGLE, Layout, Pair
from distributed.test_reshard import config_of
from distributed.test_reshard import test_a_checkpoint_is_loaded_by_another_layout_and_saved_again as carried
from gptlite.config import Config
from gptlite.models.sampling import Sampling
from gptlite.parallelism.mesh import build_mesh

CUT = Layout(tensor=2, pipeline=2, schedule="zbv")


def written(config: Config, world: int, name: str) -> list[int] | None:
    """Tokens sampled after a prompt, with caches, of a model with drawn values."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        state = filled(config, build_mesh(config.parallelism), SAVED)
        options = {"sampling": Sampling(temperature=4.0), "stop": None, "cache": True}
        with closing(state.loader):
            return list(state.model.spec.generate(state.runner, [3, 1, 4], 20, **options))


@pytest.mark.parametrize("sequence", ["false", "true"])
def test_generated_tokens_are_those_of_one_process(growing: GrowingRanks, tmp_path: Path, sequence: str):
    pair = Pair(SINGLE, CUT, "values")
    expected = written(config_of(pair, SINGLE, tmp_path), 1, "one")
    assert len(set(expected or [])) > 3
    config = config_of(pair, CUT, tmp_path, f"parallelism.sequence={sequence}")
    assert growing.run(CUT.world, "distributed.test_values:written", config) == [expected] * CUT.world


@pytest.mark.slow
@pytest.mark.parametrize("pair", [Pair(CUT, Layout(data=3, zero=3), "values")], ids=lambda pair: pair.id)
def test_a_checkpoint_is_carried(pair: Pair, growing: GrowingRanks, tmp_path: Path):
    carried(pair, growing, tmp_path)
