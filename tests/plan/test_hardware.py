"""The rates of a device and of links by the keys of a cluster, computed by hand; H200s as they were measured."""

from dataclasses import replace

import pytest

from gptlite.config.cluster import LinkConfig
from gptlite.models.gpt.config import GPTConfig
from gptlite.parallelism.axes import WORLD
from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.satellites.plan.cost import predict
from gptlite.satellites.plan.hardware import AxisPlacement, Links, device_of
from gptlite.satellites.plan.profile import plain_profile
from gptlite.satellites.plan.search import UNKNOWN
from gptlite.satellites.plan.segments import ATTENTION, MATMUL, MOVE, Op
from plan.published.row import preset
from plan.test_cost import GPT, IDEAL, REAL, work

PRODUCT = Op(MATMUL, 0.0, 2e12, 1e4, 1e4, 1e4)
# Layers, heads, width, micro-batch, fp8 and the measured milliseconds of a step (docs/benchmarks_gpu.md).
H200 = {
    "Small": (12, 12, 768, 16, False, 60.6),
    "Small, 32 sequences": (12, 12, 768, 32, False, 120.3),
    "XL": (24, 16, 2048, 16, False, 484.2),
    "XL, 4 sequences": (24, 16, 2048, 4, False, 131.0),
    "XL in fp8": (24, 16, 2048, 16, True, 397.9),
}


def step(layers, heads, width, micro, fp8, _, cluster=None):
    model = GPTConfig(num_layers=layers, num_heads=heads, d_model=width, vocab_size=50257, sequence_length=2048)
    return (
        predict(replace(work(1, model, micro, micro), fp8=fp8), cluster or preset("h200"), UNKNOWN).step_seconds * 1e3
    )


@pytest.mark.parametrize("name", H200)
def test_steps_on_an_h200_are_planned_within_5_percent(name):
    assert step(*H200[name]) == pytest.approx(H200[name][-1], rel=0.05)


def test_fp8_is_faster_than_bf16_by_what_was_measured():
    measured = H200["XL"][-1] / H200["XL in fp8"][-1]
    assert step(*H200["XL"]) / step(*H200["XL in fp8"]) == pytest.approx(measured, rel=0.05)


def test_fp8_without_a_peak_is_planned_as_bf16():
    a100 = preset("a100-80gb")
    assert step(*H200["XL in fp8"], cluster=a100) == step(*H200["XL"], cluster=a100)


def test_only_linear_layers_of_blocks_are_faster_in_fp8_and_their_operands_are_quantised():
    both = replace(REAL, peak_tflops={"bf16": 100.0, "fp8": 200.0}, matmul_efficiency={"bf16": 1.0, "fp8": 0.5})
    both = replace(both, memory_efficiency=1.0, matmul_half_size=100.0)
    device = device_of(both, "bf16", 8, fp8=True)
    assert device.half_size == 100.0  # as without fp8, which saturates at products twice as large
    assert device.seconds(PRODUCT) == pytest.approx(2e12 / 100e12 * 1.01)
    quantised = both.quantised_bytes / 2 * 2e8 / 2000e9
    assert device.block_seconds(PRODUCT) == pytest.approx(2e12 / 100e12 * 1.02 + quantised)
    heads = PRODUCT._replace(flops=16 * PRODUCT.flops)  # 16 products in one op
    assert device.block_seconds(heads) == device.seconds(heads)
    assert device_of(both, "bf16", 8).block_seconds(PRODUCT) == device.seconds(PRODUCT)


def test_attention_by_the_width_of_heads_and_the_number_of_keys():
    device = device_of(replace(IDEAL, attention_half_width=32.0, attention_half_length=1024.0), "bf16", 8)
    assert device.attention_rate(0, 0) == pytest.approx(100e12)
    assert device.attention_rate(32, 0) == pytest.approx(50e12)
    assert device.attention_rate(96, 1024) == pytest.approx(100e12 * 3 / 4 / 2)
    assert device.seconds(Op(ATTENTION, 0.0, 1e12, 2048, 96, 1024)) == pytest.approx(1e12 / 37.5e12)


# A context rank has an early and a late chunk of the queries, which see a different number of keys.
@pytest.mark.parametrize(("context", "seen"), [(1, {(2048, 128, 2048)}), (2, {(512, 128, 512), (512, 128, 2048)})])
def test_attention_is_recorded_with_its_queries_heads_and_keys(context, seen):
    (block,) = plain_profile(work(8, zero=3, context=context)).pairs[1:-1]
    for segment in block:
        assert {each[3:6] for each in segment.ops if each.kind == ATTENTION} == seen


def test_a_power_limit_slows_products_and_attention_but_not_memory():
    full = replace(REAL, full_power_watts=700.0)
    device, limited = (device_of(each, "bf16", 8) for each in (full, replace(full, power_watts=350.0)))
    assert limited.seconds(PRODUCT) == pytest.approx(2**0.5 * device.seconds(PRODUCT))
    assert limited.attention_rate(128, 2048) == pytest.approx(device.attention_rate(128, 2048) / 2**0.5)
    assert limited.move(1e9) == device.move(1e9)
    assert device_of(replace(full, power_watts=1000.0), "bf16", 8) == device
    h100 = preset("dgx-h100")
    assert step(*H200["XL"], cluster=replace(h100, power_watts=500.0)) > 1.1 * step(*H200["XL"], cluster=h100)


def test_separate_ops_move_more_bytes_and_products_do_not():
    device, separate = (device_of(each, "bf16", 8) for each in (REAL, replace(REAL, unfused=3.0)))
    assert separate.seconds(Op(MOVE, 1e9)) == pytest.approx(3 * device.seconds(Op(MOVE, 1e9)))
    read = PRODUCT._replace(moved=1e12)
    assert separate.seconds(read) == device.seconds(read)


def test_congestion_grows_with_the_nodes_of_a_group():
    slow = replace(REAL, inter=LinkConfig(gb_per_second=20, latency=0.0, congestion=0.25))
    for axis_nodes, times in ((1, 1.0), (2, 1.25), (4, 1.5), (64, 2.5)):
        group = AxisPlacement(8 * axis_nodes, 8, axis_nodes)
        for kind in ("all_gather", "send"):
            crowded, free = (
                Links(each, work(8).layout).once(kind, 1e12, group)
                for each in (slow, replace(slow, inter=replace(slow.inter, congestion=0.0)))
            )
            assert crowded == pytest.approx(times * free), (axis_nodes, kind)


def test_ranks_wait_for_the_slowest_of_more_nodes():
    slow = replace(REAL, straggle=0.01)
    for world, doublings in ((8, 0), (16, 1), (512, 6)):
        each = work(world, batch=world, zero=2)
        waited, free = (predict(each, cluster, UNKNOWN) for cluster in (slow, REAL))
        assert Links(REAL, each.layout).group(WORLD).nodes == 2**doublings
        more = waited.step_seconds - free.step_seconds
        assert more == pytest.approx(0.01 * doublings * free.compute_seconds, rel=1e-6, abs=1e-12)
        assert waited.communication_seconds - free.communication_seconds == pytest.approx(more, abs=1e-12)


def test_another_code_base_may_hide_the_tensor_axis_in_both_passes():
    exposed = {}
    for share in (0.0, 0.5, 1.0):
        cluster = replace(REAL, tensor_overlap=share)
        exposed[share] = predict(work(4, tensor=4), cluster, UNKNOWN).communication_seconds
    assert exposed[0.5] == pytest.approx((exposed[0.0] + exposed[1.0]) / 2)
    ours = predict(work(4, tensor=4), REAL, UNKNOWN).communication_seconds
    assert exposed[1.0] < 0.1 * ours < 0.1 * exposed[0.0]


def test_flat_parameters_need_no_copies_after_a_gather():
    options = {"zero": 3, "activation_checkpointing": ActivationCheckpointing.full}
    ours = work(8, batch=8, **options)
    flat = replace(ours, flat=True)
    saved = predict(ours, REAL, UNKNOWN).step_seconds - predict(flat, REAL, UNKNOWN).step_seconds
    gathered = 2 * 2 * sum(12 * GPT.d_model**2 for _ in range(GPT.num_layers))  # of 16 bits, in both passes
    assert saved == pytest.approx(2 * gathered / (2000e9 * REAL.memory_efficiency), rel=0.1)
