"""The helper that other tests trust: results in order, the first failure named, nothing left running."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.cells.run import RankFailed, Ranks, run_ranks


def add(value: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + value))
    dist.all_reduce(total)
    return os.getpid(), total.item()


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "die":
            os._exit(7)
        raise ValueError("the one")
    dist.barrier()


def sleep() -> None:
    time.sleep(60)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_one_start_serves_many_functions_and_new_ranks_come_after_a_failure():
    with Ranks(2) as ranks:
        first, second = ranks.run("distributed.test_ranks:add", 1), ranks.run("distributed.test_ranks:add", 2)
        assert [total for _, total in first] == [3.0, 3.0]
        assert [total for _, total in second] == [5.0, 5.0]
        assert [pid for pid, _ in first] == [pid for pid, _ in second]
        with pytest.raises(RankFailed, match="the one") as failure:
            ranks.run("distributed.test_ranks:fail_on", 1, "raise")
        assert failure.value.rank == 1
        assert not any(alive(pid) for pid, _ in first)
        with pytest.raises(RankFailed, match="ended with status 7") as failure:
            ranks.run("distributed.test_ranks:fail_on", 1, "die")
        assert failure.value.rank == 1
        third = ranks.run("distributed.test_ranks:add", 1)
    assert not any(alive(pid) for pid, _ in third)


def test_time_is_bounded():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 are not done"):
        run_ranks(2, "distributed.test_ranks:sleep", timeout=6)
    assert time.monotonic() - start < 30
