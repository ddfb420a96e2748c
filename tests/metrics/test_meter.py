import pytest
import torch

from gptlite.metrics.devices import device_peak_flops, peak_flops
from gptlite.metrics.meter import Throughput


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(clock, **changes):
    settings = {"tokens_per_step": 1000, "samples_per_step": 4, "flops_per_token": 5e6, "peak_flops": 1e12}
    return Throughput(**(settings | changes), clock=clock)


def run(meter, clock, steps, seconds):
    for _ in range(steps):
        clock.now += seconds
        meter.step()


def test_a_window_gives_its_own_means():
    clock = Clock()
    meter = make(clock)
    run(meter, clock, 10, 3.0)
    assert meter.read()["step_seconds"] == pytest.approx(3.0)
    run(meter, clock, 5, 0.5)
    assert meter.read() == pytest.approx(
        {"tokens_per_second": 2000, "samples_per_second": 8, "step_seconds": 0.5, "mfu": 2000 * 5e6 / 1e12}
    )


def test_the_speed_so_far_starts_no_new_window():
    clock = Clock()
    meter = make(clock)
    run(meter, clock, 2, 1.0)
    with meter.excluded():
        clock.now += 10
    assert meter.speed() == pytest.approx(1000)
    run(meter, clock, 2, 4.0)
    assert meter.speed() == meter.read()["tokens_per_second"] == pytest.approx(400)


def test_mfu_counts_every_device_and_is_none_without_a_peak():
    clock = Clock()
    eight, unknown = make(clock, num_devices=8), make(clock, peak_flops=None)
    for meter in (eight, unknown):
        meter.step()
    clock.now = 1.0
    assert eight.read()["mfu"] == pytest.approx(1000 * 5e6 / 8e12)
    assert unknown.read()["mfu"] is None


def test_evaluation_slows_the_eta_but_not_the_speed():
    clock = Clock()
    meter = make(clock)
    run(meter, clock, 1, 100.0)
    meter.read()
    run(meter, clock, 10, 1.0)
    with meter.excluded():
        clock.now += 10.0
    assert meter.read()["step_seconds"] == pytest.approx(1.0)
    assert meter.eta_seconds(50) == pytest.approx(50 * 20 / 10)
    run(meter, clock, 1, 1.0)
    assert meter.read()["step_seconds"] == pytest.approx(1.0), "excluded time must not leak into the next window"


def test_eta_leaves_the_slow_first_window_out_as_soon_as_it_can():
    clock = Clock()
    meter = make(clock)
    assert meter.eta_seconds(10) is None
    run(meter, clock, 1, 60.0)
    meter.read()
    assert meter.eta_seconds(10) == pytest.approx(600)
    run(meter, clock, 1, 2.0)
    assert meter.eta_seconds(10) == pytest.approx(20)
    assert meter.eta_seconds(0) == 0


def test_read_needs_a_step():
    with pytest.raises(RuntimeError, match="step"):
        make(Clock()).read()


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA L40S", 362, 91.6),
        ("Tesla V100-SXM2-16GB", None, 15.7),
        ("Tesla V100-PCIE-32GB", None, 14),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 3090 Ti", 80, 40),
        ("NVIDIA GeForce RTX 3090", 71, 35.6),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA A10G", None, None),
        ("Some Future Accelerator", None, None),
    ],
)
def test_peaks_by_the_name_the_driver_gives(name, bf16, fp32):
    assert peak_flops(name, torch.bfloat16) == (None if bf16 is None else pytest.approx(bf16 * 1e12))
    assert peak_flops(name, torch.float32) == (None if fp32 is None else pytest.approx(fp32 * 1e12))


def test_tf32_counts_only_where_it_exists():
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156e12
    assert peak_flops("Tesla V100-SXM2-16GB", torch.float32, tf32=True) == 15.7e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.float64) is None


def test_a_cpu_has_no_known_peak():
    assert device_peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_smaller_batches_count_for_what_they_hold():
    """A batch of one sample where four are full takes a quarter of the time, and so does the ETA of what is left."""
    clock = Clock()
    meter = make(clock)
    clock.now += 1.0
    meter.step(4)
    meter.read()
    for _ in range(2):
        clock.now += 0.25
        meter.step(1)
    row = meter.read()
    assert row["step_seconds"] == pytest.approx(0.25)
    assert (row["tokens_per_second"], row["samples_per_second"]) == pytest.approx((1000, 4))
    assert meter.eta_seconds(2.5) == pytest.approx(2.5)
