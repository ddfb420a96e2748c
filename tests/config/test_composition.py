"""The composition of the other tests, of presets that are kept, is Hydra's."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import composition
import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig

from gptlite.config import compose
from gptlite.config.compose import _initialized
from gptlite.config.schema import CONF_DIR, register

pytestmark = pytest.mark.usefixtures("composed_by_hydra")

ROOT = Path(__file__).parents[2]
RUN = ["run.dir=unused", "run.name=x"]


def composed(by: Callable[..., DictConfig], *overrides: str) -> DictConfig:
    register()
    with _initialized(CONF_DIR):
        return by("config", overrides=[*RUN, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        "model=gpt2 model.d_model=32 data=synthetic data.num_tokens=200 parallelism=tp2 seed=3".split(),
        "model.d_model=32 model=gpt2 optimizer=muon optimizer.lr=1e-3 precision=bf16 precision=fp32".split(),
        ["experiment=gpt-lite-2020", "trainer.max_steps=5", "run.dir='a b'", "plugins=[]"],
        ["+model.more=1"],
        ["+cluster.peak_tflops.bf16=1.5", "++trainer.max_steps=4"],
    ],
)
def test_it_gives_what_hydra_gives_at_first_and_again(overrides):
    expected = composed(hydra.compose, *overrides)
    for _ in range(2):
        found = composed(composition.compose, *overrides)
        assert found == expected
        assert list(found) == list(expected)
        found.trainer.max_steps = 77  # a caller's change stays its own


@pytest.mark.parametrize(
    "overrides", ["model.no_such_key=1", "modle=gpt2", "data=nowhere seed=1", "trainer.max_steps=["]
)
def test_an_error_has_the_words_of_hydra(overrides):
    errors = []
    for by in (hydra.compose, composition.compose, composition.compose):
        with pytest.raises(HydraException) as caught:
            composed(by, *overrides.split())
        errors.append(str(caught.value))
    assert errors == errors[:1] * 3


def test_the_configuration_tests_do_not_use_it():
    assert compose.compose is hydra.compose


def test_a_layout_alone_is_composed_in_a_new_process():
    """Its composition has the default data, whose schema a plug-in that comes with gptlite registers."""
    code = "from gptlite.config.compose import load_layout; print(load_layout(['parallelism=tp2']).tensor)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("2\n", "")
