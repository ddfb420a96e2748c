"""Runs that offload: their checkpoints and those of any other layout, what is refused, and what a kill leaves.

Disks that are full, cannot be written or fail are in test_offload_disks.py.
"""

import os
from collections import namedtuple
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from checkpoint.destruction.campaign import Campaign
from checkpoint.destruction.forks import shared_server

from distributed.cells.reshard import COUNTERS
from distributed.cells.reshard_pairs import SINGLE, Layout, Pair
from distributed.cells.run import GrowingRanks, Ranks
from distributed.test_reshard import check_stored, whole
from gptlite.config import load
from gptlite.config.checks import check
from gptlite.errors import ConfigError
from gptlite.launch.launcher import check_here
from gptlite.launch.room import state_file_bytes
from gptlite.optimizer.config import OptimizerConfig
from gptlite.parallelism.layout import resolve
from gptlite.satellites.nvme.state_file import StateFile

P = "parallelism."
Usage = namedtuple("Usage", "total used free")


@pytest.mark.slow
def test_a_checkpoint_goes_from_files_to_memory_to_the_host_and_back(tmp_path: Path):
    """Four ranks of ZeRO 3 with files, one without offload, two tensor ranks on the host, two pipeline ranks; two and
    three ranks with their parameters in files too, and two without offload."""
    nvme = [f"{P}offload=nvme", f"{P}offload_path={tmp_path}"]
    chain = [
        (Layout(data=4, zero=3), nvme),
        (SINGLE, []),
        (Layout(tensor=2), [f"{P}offload=cpu"]),
        (Layout(pipeline=2, zero=2), nvme),
        (Layout(data=2, zero=3), [*nvme, f"{P}offload_parameters=true"]),
        (Layout(data=3, zero=3), [*nvme, f"{P}offload_parameters=true"]),
        (Layout(data=2, zero=1), []),
    ]
    expected, loss = whole(Pair(SINGLE, SINGLE))
    folder = None
    with closing(GrowingRanks((4,))) as ranks:
        for number, (layout, more) in enumerate(chain):
            overrides = [*Pair(layout, SINGLE).overrides(layout), f"run.dir={tmp_path / str(number)}", *more]
            function, resume = ("save", []) if folder is None else ("resume", [f"checkpoint.resume={folder}"])
            found = ranks.run(layout.world, f"distributed.cells.reshard:{function}", load([*overrides, *resume]))
            if folder is not None:
                assert found[0].wrong == []
                assert all(each.counters == COUNTERS for each in found)
                assert [each.loss for each in found] == pytest.approx([loss] * layout.world, rel=1e-5)
            folder = found[0] if folder is None else found[0].folder
            check_stored(folder, expected)
    assert {path.name for path in tmp_path.iterdir()} == set("0123456")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], [f"{P}offload_parameters=true"]], ids=["state", "parameters"])
def test_a_killed_run_leaves_nothing_in_the_folder_and_goes_on_from_its_checkpoint(tmp_path: Path, more: list[str]):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    overrides = [f"{P}offload=nvme", f"{P}offload_path={scratch}", f"{P}offload_buffer_mib=1", f"{P}zero=3", *more]
    campaign = Campaign(shared_server(), tmp_path, overrides, seed=0, interval=2)
    campaign.probe()
    campaign.kill_at("data")
    campaign.kill_by_time()
    assert list(scratch.iterdir()) == []
    assert sum(campaign.hits.values()) == 2
    assert campaign.differing() == []


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_here(load(["optimizer=adamw", f"{P}offload=nvme", *overrides]), None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_not_there_is_refused_before_any_rank_starts(tmp_path: Path):
    path = tmp_path / "nvme"
    assert refused(f"{P}offload_path={path}") == (
        f"parallelism.offload_path={path} is not a folder; create it on a local disk, or give another folder"
    )
    path.write_text("")
    assert "is not a folder" in refused(f"{P}offload_path={path}")


def test_a_disk_with_too_little_room_is_refused_before_any_rank_starts(tmp_path: Path):
    """gpt3-small's 124 million parameters and 50304 - 50257 rows of padding have 8 bytes of moments each."""
    overrides = [f"{P}offload_path={tmp_path}", f"{P}data=4", "model=gpt3-small", "model.vocab_size=50257"]
    with mock.patch("shutil.disk_usage", return_value=Usage(0, 0, 10**9)):
        line = refused(*overrides, f"{P}zero=0")
        assert line.startswith(f"parallelism.offload_path={tmp_path}: the optimizer state of 4 ranks takes 4")
        assert line.endswith(" MB, but only 1000.0 MB are free; free some, or give another folder")
        line = refused(*overrides, f"{P}zero=3", f"{P}offload_parameters=true")
        assert line.startswith(
            f"parallelism.offload_path={tmp_path}: the model and optimizer state of 4 ranks takes 20"
        )
    on_disk = mock.patch("gptlite.launch.room._in_memory", return_value=False)  # wherever this machine has its /tmp
    with on_disk, mock.patch("shutil.disk_usage", return_value=Usage(0, 0, 1.1e9)):
        check_here(load([f"{P}offload=nvme", *overrides, f"{P}zero=3"]), None)  # shards: all of it once


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="no file system in memory here")
def test_a_folder_in_memory_is_refused_before_any_rank_starts():
    for more in ([], [f"{P}offload_parameters=true", f"{P}zero=3"]):
        assert refused(f"{P}offload_path=/dev/shm", *more) == (
            "parallelism.offload_path=/dev/shm is on tmpfs, which keeps files in memory; give a folder on a disk, or "
            "use parallelism.offload=cpu"
        )


def test_the_room_that_is_asked_for_is_the_files_own(tmp_path: Path):
    config = load(
        [*Pair(SINGLE, SINGLE).overrides(SINGLE), "run.dir=unused", f"{P}offload=nvme", f"{P}offload_path={tmp_path}"]
    )
    with Ranks(1) as ranks:
        (size,) = ranks.run("distributed.cells.offload:file_size", config)
    assert size == state_file_bytes(config, resolve(config.parallelism, 1), 1)


def test_the_file_has_no_name_and_all_its_blocks(tmp_path: Path):
    file = StateFile(tmp_path, 10 * 2**20)
    found = os.fstat(file._file.fileno())
    assert found.st_blocks * 512 >= 10 * 2**20
    assert found.st_nlink == 0


class NotElementwiseConfig(OptimizerConfig):
    """An optimizer that looks at whole matrices."""


def test_an_optimizer_that_is_not_elementwise_keeps_its_state_out_of_files(tmp_path: Path):
    config = load(["optimizer=adamw", f"{P}offload=nvme", f"{P}offload_path={tmp_path}"])
    with pytest.raises(ConfigError, match=r"optimizer=notelementwise does not allow; use parallelism.offload=cpu, or"):
        check(replace(config, optimizer=NotElementwiseConfig()))
