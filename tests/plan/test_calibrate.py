"""Measuring this machine: the arithmetic of what is measured, and that a calibration ends and can be planned with."""

import re
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from gptlite import precision
from gptlite.config import load
from gptlite.config.cluster import ClusterConfig, LinkConfig
from gptlite.cpu import cpu_cores
from gptlite.errors import ConfigError
from gptlite.precision import PrecisionConfig, resolve_precision
from gptlite.satellites.plan import calibrate as module
from gptlite.satellites.plan import local
from gptlite.satellites.plan.calibrate import (
    best,
    calibrate,
    kernel_seconds,
    link_of,
    matmul_rates,
    memory_bandwidth,
    ranks,
    saturation,
)
from gptlite.satellites.plan.local import LOCAL_LINK, read_calibration, this_machine, write_calibration
from gptlite.satellites.plan.planning import planned_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("noise", "near", "near_half"), [((1.0,) * 5, 1e-6, 1e-6), ((1.04, 0.97, 1.02, 0.96, 1.03), 0.1, 0.25)]
)
def test_saturation_finds_the_curve_it_is_given(noise, near, near_half):
    rates = {k: 5e12 * k / (k + 80) * f for k, f in zip((16, 64, 256, 512, 1024), noise, strict=True)}
    largest, half = saturation(rates)
    assert largest == pytest.approx(5e12, rel=near)
    assert half == pytest.approx(80, rel=near_half)


def test_rates_that_do_not_rise_have_no_half_size():
    assert saturation({16: 3e12, 64: 2e12, 256: 1e12}) == (3e12, 0.0)


def test_the_fastest_of_several_runs_counts():
    pauses = iter([0.05, 0.02, 0.001, 0.03] + [0.02] * 50)
    assert 0.001 <= best(lambda: time.sleep(next(pauses)), 0.0) < 0.015


def test_what_is_measured_is_of_the_right_order(monkeypatch):
    monkeypatch.setitem(module.INNER, "cpu", (16, 256))
    monkeypatch.setitem(module.OUTER, "cpu", 256)
    rates = matmul_rates(CPU, torch.float32, 0.1)
    assert list(rates) == [16, 256]
    assert all(1e8 < rate < 1e14 for rate in rates.values())
    assert 1e8 < memory_bandwidth(CPU, 0.05) < 5e12
    assert 1e-7 < kernel_seconds(CPU) < 1e-3


def test_bandwidth_is_of_tensors_of_the_given_bytes(monkeypatch):
    sizes = []
    monkeypatch.setitem(module.POINTWISE_BYTES, "cpu", 4096)
    monkeypatch.setattr(torch, "add", lambda a, b, out: sizes.extend(each.nbytes for each in (a, b, out)))
    monkeypatch.setattr(module, "best", lambda call, seconds: call() or 2.0)
    assert memory_bandwidth(CPU, 0.0) == 3 * 4096 / 2.0
    assert sizes == [4096] * 3


@pytest.mark.parametrize("flags", [set(), {"avx2"}, {"avx512_bf16"}, {"avx512_bf16", "amx_bf16"}])
def test_a_cpu_that_nobody_has_measured_multiplies_in_what_a_run_would(monkeypatch, flags):
    monkeypatch.setattr(local, "cpu_flags", lambda: flags)
    monkeypatch.setattr(precision, "cpu_flags", lambda: flags)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    taken = resolve_precision(PrecisionConfig(), CPU).compute_dtype
    assert getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[planned_dtype(load([]), local.assumed())]) == taken


def test_a_gpu_that_nobody_has_measured_is_that_of_its_data_sheet(monkeypatch):
    memory = SimpleNamespace(total_memory=40 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: memory)
    found = local.assumed()
    assert (found.device, found.devices_per_node, found.memory_gib) == ("cuda", 4, 40.0)
    assert found.peak_tflops == pytest.approx({"fp32": 19.5, "bf16": 312.0, "fp16": 312.0})


def test_ranks_that_do_not_answer_are_given_up(monkeypatch):
    said, started = [], time.monotonic()
    monkeypatch.setattr(module, "RANKS_SECONDS", 0.2)  # they need longer to import torch
    assert ranks(CPU, said.append) == (LOCAL_LINK, 1.0)
    assert time.monotonic() - started < 20
    assert "did not finish within" in said[0]


@pytest.mark.parametrize(
    ("small", "large", "bandwidth", "latency"),
    [
        (1e-4, 1e-4 + 2**22 / 5e9, 5.0, 5e-5),
        (5.8e-3, 5.0e-3, 2**22 / 5e-4 / 1e9, 2.9e-3),  # the small one was interrupted
        (5.0e-3, 5.0e-3 + 1e-7, 2**22 / 5e-4 / 1e9, 2.5e-3),
    ],
)
def test_a_busy_machine_has_no_link_beyond_belief(small: float, large: float, bandwidth: float, latency: float) -> None:
    link = link_of(small, large)
    assert link.gb_per_second == pytest.approx(bandwidth, rel=1e-3)
    assert link.latency == pytest.approx(latency)


@pytest.mark.slow
def test_two_ranks_measure_their_link(monkeypatch):
    said = []
    monkeypatch.setattr(module, "RANKS_SECONDS", 80.0)
    link, crowding = ranks(CPU, said.append)
    assert said[0].startswith("two ranks: ")
    assert 1e-6 < link.latency < 0.1
    assert 0.01 < link.gb_per_second < 200
    assert crowding >= 1


@pytest.mark.slow
def test_a_calibration_ends_in_time_and_is_read_back(tmp_path):
    said, started = [], time.monotonic()
    cluster = calibrate(3.0, said.append)
    assert time.monotonic() - started < 90
    assert cluster.calibrated
    assert cluster.devices_per_node == (torch.cuda.device_count() or cpu_cores())
    assert 0 < cluster.matmul_efficiency["fp32"] <= 1
    assert cluster.crowding >= 1
    assert cluster.attention_tflops.keys() == cluster.peak_tflops.keys()
    assert all(0 < rate < cluster.peak_tflops[name] * 3 for name, rate in cluster.attention_tflops.items())
    assert len(said) >= 3
    write_calibration(tmp_path / "cluster.yaml", cluster)
    found = read_calibration(tmp_path / "cluster.yaml")
    assert found is not None
    assert asdict(found) == asdict(cluster)


@pytest.mark.parametrize("line", ["n\tame: x", "? [a]\n: 1", "name: 2026-99-99", "name: [1", "- 1"])
def test_a_damaged_calibration_is_refused_in_a_line(tmp_path, line):
    path = tmp_path / "cluster.yaml"
    path.write_text(line + "\nmachine: one\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml: .*; delete the file, or run") as refused:
        read_calibration(path)
    assert "\n" not in str(refused.value)


def test_what_is_given_of_this_machine_counts_beside_what_was_measured(tmp_path):
    links = (LinkConfig(gb_per_second=3.0, latency=1e-3), LinkConfig(gb_per_second=4.0))
    measured = ClusterConfig(name="local", device="cpu", nodes=1, devices_per_node=2, memory_gib=24.0,
                             peak_tflops={"fp32": 0.2}, intra=links[0], inter=links[1])  # fmt: skip
    path = tmp_path / "new" / "folder" / "cluster.yaml"
    write_calibration(path, measured)
    fresh = ClusterConfig(name="local", device="auto", nodes=None, devices_per_node=None)
    assert this_machine(fresh, print, path) == measured
    given = replace(fresh, memory_gib=6.0, disk_path="/nvme", peak_tflops={"bf16": 0.8}, devices_per_node=4,
                    intra=LinkConfig(efficiency=0.5))  # fmt: skip
    assert this_machine(given, print, path) == replace(
        measured, memory_gib=6.0, disk_path="/nvme", peak_tflops={"fp32": 0.2, "bf16": 0.8}, devices_per_node=4,
        intra=replace(links[0], efficiency=0.5),
    )  # fmt: skip
    # What is given counts even where it is what a fresh cluster has.
    same = this_machine(fresh, print, path, explicit={"memory_gib", "intra.gb_per_second", "name"})
    assert same == replace(measured, memory_gib=80.0, intra=replace(links[0], gb_per_second=1.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_gib": -1.0}, "cluster.memory_gib=-1 must be above 0"),
        ({"disk_gb_per_second": 0.0}, "cluster.disk_gb_per_second=0 must be above 0"),
        ({"overlap": -0.5}, "cluster.overlap=-0.5 must be at least 0"),
        ({"peak_tflops": {"fp32": 0.0}}, "cluster.peak_tflops.fp32=0 must be above 0"),
        ({"inter": LinkConfig(latency=-1e-6)}, "cluster.inter.latency=-1e-06 must be at least 0"),
        ({"memory_gib": float("nan")}, "cluster.memory_gib=nan must be above 0"),
        ({"device": "auto"}, "cluster.device=auto is only for cluster=local"),
        pytest.param(
            {"devices_per_node": None},
            "cluster.devices_per_node=null: this machine has no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has GPUs"),
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        this_machine(ClusterConfig(**given), print)
