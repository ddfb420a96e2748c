"""Checkpoints that each supported version of torch wrote are read by the installed one.

The stored files are of one run, `train.py` with the overrides in their config.yaml, under torch 2.11, 2.13, 2.14 and
2.15.
"""

import hashlib
import pickle
import tarfile
from pathlib import Path

import pytest
import torch
from checkpoint.conftest import bits
from run_files import read_metrics
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from gptlite.checkpoint.load import whole_tensors
from gptlite.checkpoint.manifest import verify
from gptlite.checkpoint.metadata import _set_properties
from gptlite.config.saved import from_yaml
from gptlite.start.pretrain import pretrain

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = ("2.11", "2.13", "2.14", "2.15")
# The first half of the SHA-256 of all tensors' bytes, by name, and the losses of steps 3 and 4. No version differs.
TENSORS = "44dd14057e2bdb81f327c9041092dc7a"
LOSSES = [2.57762348651886, 2.5526031255722046]


@pytest.fixture(params=VERSIONS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A step folder that this version of torch wrote, in a run's folder."""
    with tarfile.open(FIXTURES / f"torch-{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path / "run" / "checkpoints", filter="data")
    return tmp_path / "run" / "checkpoints" / "step-00000002"


def test_tensors_and_training_are_those_of_the_run(stored: Path, tmp_path: Path) -> None:
    manifest = verify(stored, print)
    read = whole_tensors(stored, print)
    digest = hashlib.sha256(b"".join(bits(read(key)) for key in sorted(manifest.tensors)))
    assert digest.hexdigest()[:32] == TENSORS
    config = from_yaml((stored / "config.yaml").read_text())
    config.run.dir, config.trainer.max_steps, config.parallelism.zero = str(stored.parents[1]), 4, 0
    config.data.cache_dir = str(tmp_path / "cache")
    assert pretrain(config).exit_code == 0
    losses = [row["loss"] for row in read_metrics(stored.parents[1]) if "loss" in row]
    assert losses == pytest.approx(LOSSES, rel=1e-5)


@pytest.mark.parametrize("fields", [("1",), ((1.5,),), ((1,), (1,)), ([1],)])
def test_strides_are_nothing_but_strides(fields: tuple[object, ...]) -> None:
    """torch 2.15 added them to the properties of a tensor."""
    usual = torch.float32, torch.strided, False, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, False
    for given in ((), (None,), ((2, 1),)):
        _set_properties(TensorProperties(), (*usual, *given))
    with pytest.raises(pickle.UnpicklingError, match="properties of a tensor"):
        _set_properties(TensorProperties(), (*usual, *fields))
