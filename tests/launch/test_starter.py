"""What the environment says of a rank is checked before the rank waits for others."""

import pytest

from gptlite.errors import ConfigError
from gptlite.launch.starter import starter

RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK, *TASK, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "changed", "said"),
    [
        (RANK, {"WORLD_SIZE": "-2"}, "WORLD_SIZE=-2 is not a number of ranks; set 1 or more, or unset it"),
        (RANK, {"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a number of ranks"),
        (RANK, {"RANK": "2"}, "RANK=2 is not from 0 to 1, below WORLD_SIZE=2; set it, or unset both"),
        (RANK, {"RANK": "-1"}, "RANK=-1 is not from 0 to 1"),
        (RANK, {"LOCAL_RANK": "5"}, "LOCAL_RANK=5 is not from 0 to 1, below LOCAL_WORLD_SIZE=2"),
        (RANK, {"RANK": "x"}, "RANK=x is not a number"),
        (RANK, {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port; set 1 to 65535, or unset it"),
        (RANK, {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        (RANK, {"MASTER_ADDR": ""}, "MASTER_ADDR is empty; set it to rank 0's machine, or unset it"),
        (TASK, {"MASTER_PORT": "-1"}, "MASTER_PORT=-1 is not a port"),
        (TASK, {"SLURM_NTASKS": "-2"}, "SLURM_NTASKS=-2 is not a number of ranks"),
        (TASK, {"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 is not from 0 to 1, below SLURM_NTASKS=2"),
        (TASK, {"SLURM_NODEID": "-1"}, "SLURM_NODEID=-1 is not a machine"),
        (TASK, {"SLURM_PROCID": "2"}, "SLURM_PROCID=2 is not from 0 to 1, below SLURM_NTASKS=2"),
    ],
)
def test_a_place_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], changed: dict[str, str], said: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = starter()
    assert found is not None
    assert (found.rank, found.world_size) == (1, 2)
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        starter()
    assert str(error.value).startswith(f"the environment's {said}")
