"""Average memory and utilisation, against work and memory that are known."""

import threading
import time

import pytest
import torch
from monitor.pages import new_pages

from gptlite.satellites.monitor import usage as module
from gptlite.satellites.monitor.usage import Usage, gpu_utilization

CPU = torch.device("cpu")


@pytest.fixture
def usage():
    found = Usage(CPU, seconds=0.01)
    yield found
    found.close()


def test_a_busy_process_is_used_and_one_that_sleeps_is_not(usage, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    time.sleep(0.3)
    idle = usage.read()["utilization"]
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass
    busy = usage.read()["utilization"]
    assert idle < 0.35
    assert 0 < busy <= 1
    assert busy > idle


def test_the_average_is_over_the_time_and_below_the_peak(usage):
    before = usage.read()["memory_average_bytes"]
    block = new_pages(64 << 20)
    time.sleep(0.2)
    held = usage.read()["memory_average_bytes"]
    assert held - before > 0.5 * block.nbytes
    assert usage.memory == held  # the first row warms up
    assert usage.utilization is not None


def test_rows_count_by_their_length(usage):
    usage._rows = [(9.0, 900, 0.9), (3.0, 100, 0.2), (1.0, 200, None)]
    assert (usage.memory, usage.utilization) == (125, pytest.approx(0.2))
    usage._rows = [(9.0, None, None)]
    assert (usage.memory, usage.utilization) == (None, None)


def test_a_read_at_once_has_a_sample(usage):
    assert usage.read()["memory_average_bytes"]


def test_without_nvml_the_utilisation_is_unknown(monkeypatch):
    def missing(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert gpu_utilization(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 37)
    assert gpu_utilization(torch.device("cuda")) == 0.37


def test_its_thread_ends():
    found = Usage(CPU, seconds=0.01)
    found.close()
    until = time.monotonic() + 5
    while any(thread.name == "usage" and thread.is_alive() for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert module.SAMPLE_SECONDS == 0.1


def test_a_long_wait_for_a_row_keeps_no_samples(usage):
    time.sleep(0.1)
    assert usage._means[0].count > 3
    assert not any(value for value in vars(usage).values() if isinstance(value, list))
    mean = module._Mean()
    for value in (100, None, 200, 600):
        mean.add(value)
    assert (mean.value, module._Mean().value) == (300, None)
