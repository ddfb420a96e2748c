"""What the environment says of a rank is checked before the rank waits for others."""

import pytest

from gptlite.errors import ConfigError
from gptlite.launch.starter import Starter, starter

RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK, *TASK, "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
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


def test_ranks_without_a_local_rank_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Kubernetes' training operators, one on each machine."""
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK")
    assert starter() == Starter("RANK and WORLD_SIZE", 1, 2, 0, 1, "localhost", 1)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match="RANK=1 and WORLD_SIZE=2 are of a run on several ranks, but MASTER_PORT is"):
        starter()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert starter() is None


def test_a_step_of_one_task_in_a_larger_job_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TASK, "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert starter() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert starter().world_size == 2  # type: ignore[union-attr]
    for name, value in (("SLURM_PROCID", "3"), ("SLURM_LOCALID", "3")):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"{name}=3 is not from 0 to 1, below SLURM_STEP_NUM_TASKS=2;"):
            starter()
        monkeypatch.setenv(name, "0")
