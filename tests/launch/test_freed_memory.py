"""A process that trains on a CPU keeps the memory of tensors it has freed, and has it in huge pages."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from marking import marked

from gptlite.config import load
from gptlite.launch import process, worker
from gptlite.launch.starter import Starter
from gptlite.start import run

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 2**20

# Prints the page faults of a tensor of 60 MiB, where one of 64 was, and its bytes in huge pages. Not of the same size:
# the memory of a tensor freed alone is short by less than a page for the next one, where it is not aligned by chance.
PROGRAM = """
import re, resource, sys
from gptlite.launch.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
import torch
torch.set_num_threads(1)
first = torch.ones(16 * 2**20)
del first
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
second = torch.ones(15 * 2**20)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
found = re.search(r"AnonHugePages: *([0-9]+) kB", open("/proc/self/smaps_rollup").read())
print(faults, int(found[1]) * 1024)
"""

# Prints the same of a rank's first tensors, made where its training would begin.
RANK = """
import os, re, resource, sys, tempfile
from pathlib import Path
from gptlite.launch import worker
from gptlite.config import load
from gptlite.config.saved import to_yaml
from gptlite.launch.starter import Starter
from gptlite.start import run

def train_rank(*given, **also):
    import torch
    torch.set_num_threads(1)
    first = torch.ones(16 * 2**20)
    del first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    second = torch.ones(15 * 2**20)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    found = re.search(r"AnonHugePages: *([0-9]+) kB", open("/proc/self/smaps_rollup").read())
    print(faults, int(found[1]) * 1024, flush=True)
    return 0

worker.train_rank = train_rank
config = load(["run.dir=unused"])
os.environ.update(RANK="0", WORLD_SIZE="1")
if sys.argv[1] == "ours":
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.yaml").write_text(to_yaml(config))
        worker.main([folder, "0", str(os.getppid())], lambda *given: 0)
worker.under(Starter("torchrun", 0, 1, 0, 1, "localhost", 1), config, 0.0, lambda *given: 0)
"""


@cache
def measured(how: str, **environment: str) -> tuple[int, int]:
    """Page faults and bytes in huge pages, of a process of its own."""
    given = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", PROGRAM, how]
    found = subprocess.run(command, env=given | environment, capture_output=True, text=True, timeout=120, check=True)
    faults, huge = found.stdout.split()
    return int(faults), int(huge)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there malloc is told so")
def test_freed_memory_is_kept():
    assert measured("kept")[0] < 64


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there malloc is told so")
def test_without_the_setting_freed_memory_goes_back_to_the_system():
    """What a process that trains is spared."""
    faults, huge = measured("stock")
    assert faults > 10_000
    assert huge < 8 * MIB or not HUGE.exists() or "[madvise]" not in HUGE.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this kernel gives no huge pages")
def test_large_tensors_are_in_huge_pages():
    assert measured("kept")[1] >= 32 * MIB


@pytest.mark.parametrize("starter", marked(["ours", "torchrun"], 1, 1))
@pytest.mark.skipif(sys.platform != "linux", reason="only there malloc is told so")
def test_each_rank_keeps_its_memory_and_has_it_in_huge_pages(starter):
    given = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", RANK, starter]
    found = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout, found.stderr
    faults, huge = map(int, found.stdout.split()[-2:])  # after "starting ...", on a slow machine
    assert faults < 64
    assert huge >= 32 * MIB or not HUGE.exists() or "[never]" in HUGE.read_text()


class Kept(Exception):
    """That memory is to be kept."""


def test_a_command_keeps_its_memory_before_all_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "keep_freed_memory", mock.Mock(side_effect=Kept))
    monkeypatch.setattr(run, "settled", None)
    with pytest.raises(Kept):
        run.launch_command(load(["run.dir=unused"]), 0.0)


@pytest.mark.parametrize(("name", "shared"), [("torchrun", []), ("srun", ["a core of 4"])])
def test_a_rank_of_torchrun_or_srun_keeps_its_memory_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, name: str, shared: list[str]
):
    calls = []
    monkeypatch.setattr(process, "keep_freed_memory", lambda: calls.append("keep"))
    monkeypatch.setattr(process, "share_cores", lambda ranks: calls.append(f"a core of {ranks}"))
    monkeypatch.setattr(worker, "train_rank", lambda *_: calls.append("train"))
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))  # which the starter sets; restored after the test
    worker.under(Starter(name, 0, 8, 0, 4, "localhost", 1), load(["run.dir=unused"]), 0.0, lambda *_: 0)
    assert calls == ["keep", *shared, "train"]


@pytest.mark.slow
@pytest.mark.skipif(not HUGE.exists() or "[madvise]" not in HUGE.read_text(), reason="huge pages are for all or none")
def test_the_environment_has_the_last_word():
    assert measured("kept", THP_MEM_ALLOC_ENABLE="0")[1] < 8 * MIB
