"""Ranks of another launcher that never meet, or that use the same GPU: one line that names the variables."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from distributed.cells.commands import TRAIN, Start, free_port
from torch.distributed import DistNetworkError, DistStoreError, HashStore  # type: ignore[attr-defined]

from gptlite.errors import ConfigError
from gptlite.launch import meeting, worker
from gptlite.launch.starter import UNNAMED, Starter
from gptlite.parallelism import process_group

RANK = Starter("torchrun", 1, 4, 1, 2, "node1", 29500)
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@pytest.mark.parametrize("error", [DistStoreError("1/4 clients joined"), DistNetworkError("timed out")])
def test_a_rank_that_waits_names_the_variables_and_then_gives_up(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.01)
    told, said = Event(), []

    def tell(text: str) -> None:
        said.append(text)
        told.set()

    def join() -> None:
        with meeting.meeting(RANK, NAMES, 300, tell):
            assert told.wait(10)
            raise error

    with pytest.raises(ConfigError) as refusal:
        join()
    stale = "if this process is not a rank of that run, unset RANK WORLD_SIZE MASTER_ADDR, from which it was read"
    assert said == [f"rank 1 of 4 is waiting for the others at node1:29500; {stale}"]
    assert str(refusal.value).startswith(
        f"rank 1 of 4 did not meet the others at node1:29500 in parallelism.timeout_seconds=300; {stale}; "
    )


def test_ranks_that_meet_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_SECONDS", 0.2)
    said = []
    with meeting.meeting(RANK, NAMES, 300, said.append):
        pass
    assert not Event().wait(0.3)
    assert said == []


@pytest.mark.parametrize(("gpus", "shared"), [("ab", ""), ("aa", "ranks {} and {} both use GPU a of ")])
def test_two_ranks_on_one_gpu_are_refused_on_both(gpus: str, shared: str) -> None:
    store = HashStore()

    def claim(rank: int) -> str:
        try:
            process_group.claim_gpu(store, rank, 2, gpus[rank])
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(claim, range(2))
    assert first == second
    assert any(first.startswith(shared.format(*pair)) for pair in ((0, 1), (1, 0)))
    assert not shared or "since LOCAL_RANK is not set; set LOCAL_RANK to 0, 1, ..." in first


@pytest.mark.parametrize(("name", "claims"), [(UNNAMED, True), ("torchrun", False)])
def test_ranks_without_a_local_rank_claim_their_gpus(name: str, claims: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a mock of torch's GPUs, since NCCL refuses a shared one without naming a variable."""
    claimed, joined = [], []
    monkeypatch.setattr(process_group, "_refuse_address", lambda: None)
    monkeypatch.setattr(process_group, "_choose_interfaces", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for what, value in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, what, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"uuid": "GPU-1"}))
    store = HashStore()
    monkeypatch.setattr(process_group.dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **more: joined.append(more))
    monkeypatch.setattr(process_group, "claim_gpu", lambda *given: claimed.append(given))
    worker._meet(5, None, Starter(name, 0, 2, 0, 1, "node1", 29500), NAMES)
    assert claimed == [(store, 0, 2, "GPU-1")] * claims
    assert [(each["store"], each["rank"]) for each in joined] == [(store, 0) if claims else (None, -1)]


@pytest.mark.slow
def test_variables_of_an_old_shell_end_in_a_line(start: Start, tiny: list[str]) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    code, output, errors = start(TRAIN, *tiny, "parallelism.timeout_seconds=2", env=env).end()
    assert (code, errors.count("\n")) == (2, 1), errors
    assert all(line.endswith(" so far") for line in output.splitlines())  # of a slow start
    assert errors.startswith(
        f"error: rank 0 of 2 did not meet the others at 127.0.0.1:{env['MASTER_PORT']} in parallelism."
    )
    assert "unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, from which" in errors
