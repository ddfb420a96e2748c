"""The cost model: what it says of single terms is computed by hand here, and how they add up."""

import time
from dataclasses import replace

import pytest
import torch

from gptlite.config.cluster import ClusterConfig, LinkConfig
from gptlite.errors import ConfigError
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import flops_per_token
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdamWConfig, MuonConfig, SGDConfig
from gptlite.parallelism.config import ActivationCheckpointing, Offload, ParallelismConfig
from gptlite.parallelism.layout import SCHEDULES, Layout, num_stages, resolve, schedule_refuses, stages_of_rank
from gptlite.satellites.plan.cost import COPY_OPS, OPS, cost_per_billion_tokens, model_seconds, predict
from gptlite.satellites.plan.hardware import AxisPlacement, Device, Links, device_of, rank_share, waiting_for_cores
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.parameters import stages
from gptlite.satellites.plan.profile import plain_profile
from gptlite.satellites.plan.segments import ATTENTION, MATMUL, MOVE, Op
from gptlite.satellites.plan.timeline import pipeline_seconds, timeline
from gptlite.satellites.plan.workload import Transfer, Workload

# Nothing but arithmetic: 100 TFLOP/s, all of it, memory and links for free.
IDEAL = ClusterConfig(
    devices_per_node=8,
    peak_tflops={"bf16": 100.0},
    matmul_efficiency={"bf16": 1.0},
    matmul_half_size=0.0,
    attention_efficiency=1.0,
    memory_gb_per_second=1e12,
    kernel_seconds=0.0,
    intra=LinkConfig(gb_per_second=1e12, latency=0.0),
    inter=LinkConfig(gb_per_second=1e12, latency=0.0),
)
REAL = replace(
    IDEAL,
    memory_gb_per_second=2000.0,
    intra=LinkConfig(gb_per_second=200, latency=1e-6),
    inter=LinkConfig(gb_per_second=20, latency=1e-5),
)
GPT = GPTConfig(num_layers=16, num_heads=16, d_model=2048, vocab_size=32000, sequence_length=2048)


def work(world, model=GPT, batch=64, micro=1, attention=Attention.sdpa, dtype="bf16", device="cuda", **keys):
    config = ParallelismConfig(**keys)
    return Workload(
        model=model,
        parallelism=config,
        layout=resolve(config, world),
        optimizer=AdamWConfig(),
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_length=model.sequence_length,
        dtype=dtype,
        attention=attention,
        device=device,
    )


def device(**keys):
    return replace(Device(1e14, 1.0, 0.0, 1e14, 1e12, 0.0, 2), **keys)


def product(its, rows, inner, columns, itemsize=2):
    """Seconds of [rows, inner] x [inner, columns], each number moved once."""
    moved = (rows * inner + inner * columns + rows * columns) * itemsize
    return its.seconds(Op(MATMUL, moved, 2 * rows * inner * columns, rows, inner, columns))


@pytest.mark.parametrize(("world", "keys"), [(1, {}), (8, {"tensor": 2}), (8, {"tensor": 2, "zero": 3}), (8, {})])
def test_muons_products_are_shared_by_the_ranks_that_hold_a_matrix(world, keys):
    """A block has q, k, v and the projection of attention, and two matrices of the MLP, which are 4 times as wide."""
    wide, square = 2 * 2048**2 * (4 * 2048), 2 * 2048**3
    flops = 16 * 5 * (4 * 3 * square + 2 * (2 * wide + square))
    found = [predict(replace(work(world, **keys), optimizer=each), IDEAL) for each in (AdamWConfig(), MuonConfig())]
    assert found[1].optimizer_seconds - found[0].optimizer_seconds == pytest.approx(flops / 1e14 / world, rel=1e-3)


def test_muon_sends_shards_to_owners_and_back_and_copies_to_all():
    muon = {"optimizer": MuonConfig()}
    links = replace(IDEAL, intra=LinkConfig(gb_per_second=100, latency=0.0, efficiency=1.0))
    numbers = 4 * 16 * 12 * 2048**2  # bytes of all matrices in fp32
    for keys, sent in (
        ({"zero": 1}, 2 * numbers / 8 * 7 / 8),
        ({}, numbers * 7 / 8),
        ({"tensor": 2, "zero": 3}, 2 * numbers / 8 * (1 / 2 + 3 / 4)),
    ):
        its = replace(work(8, **keys), **muon)
        seconds = predict(its, links).optimizer_seconds - predict(its, IDEAL).optimizer_seconds
        assert seconds == pytest.approx(sent / 100e9, rel=1e-3)


def test_a_product_is_bound_by_arithmetic_or_by_memory():
    assert product(device(), 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 1e14)
    # Of one row nothing is used twice: 4096 x 4096 numbers of 2 bytes, and two rows.
    assert product(device(), 1, 4096, 4096) == pytest.approx((4096**2 + 2 * 4096) * 2 / 1e12)
    assert product(device(kernel=1e-5), 1, 1, 1) == pytest.approx(1e-5, rel=1e-3)


def test_a_product_reaches_half_of_its_speed_at_the_half_size():
    large = product(device(), 1024, 256, 1024)
    assert product(device(half_size=256), 1024, 256, 1024) == pytest.approx(2 * large)
    assert product(device(half_size=256), 256, 1024, 1024) == pytest.approx(2 * large)  # the smallest, wherever it is


def test_a_product_off_the_tensor_cores_is_slower_but_sooner_busy():
    slow = device(multiple=8, unaligned=0.25, bandwidth=1e14)
    assert product(slow, 512, 512, 520) == product(device(), 512, 512, 520)
    assert product(slow, 512, 512, 516) == pytest.approx(4 * product(device(), 512, 512, 516))
    assert product(replace(slow, itemsize=4), 512, 512, 516, 4) == pytest.approx(2 * 512 * 512 * 516 / 1e14)
    # Half of its speed is reached at a quarter of the size.
    halved = product(replace(slow, half_size=400.0), 4000, 100, 4000)
    assert halved == pytest.approx(8 * product(device(bandwidth=1e14), 4000, 100, 4000))


def test_ideal_hardware_computes_the_models_flops():
    """12 d^2 (24 B S d^2 forward, three times that), S/2 keys a query, and the head."""
    its = work(1)
    found = predict(its, IDEAL)
    # Flash attention computes the scores once more: 2.5 times for the backward pass instead of 2.
    again = 0.5 * 2 * 2 * GPT.num_layers * GPT.d_model * GPT.sequence_length / 2 * its.tokens
    padding = 6 * GPT.d_model * (GPT.padded_vocab_size - 32000) * its.tokens
    flops = flops_per_token(GPT, GPT.sequence_length) * its.tokens + again + padding
    assert found.step_seconds == pytest.approx(flops / 1e14, rel=1e-6)
    assert found.tokens_per_second == pytest.approx(its.tokens / found.step_seconds)
    assert found.mfu == pytest.approx(1 - (again + padding) / flops, rel=1e-6)


def test_full_recomputation_costs_a_forward_pass_of_the_blocks():
    none, selective, full = (
        predict(work(1, activation_checkpointing=ActivationCheckpointing[mode]), IDEAL).step_seconds
        for mode in ("none", "selective", "full")
    )
    tokens = 64 * 2048
    forward = GPT.num_layers * tokens * (24 * GPT.d_model**2 + 4 * GPT.d_model * 1024)
    assert full - none == pytest.approx(forward / 1e14, rel=1e-6)
    assert selective == pytest.approx(none, rel=1e-6)  # what it makes again is free here
    real = [
        predict(work(1, activation_checkpointing=ActivationCheckpointing[m]), REAL).step_seconds
        for m in ("none", "selective", "full")
    ]
    assert real[0] < real[1] < real[2]


def test_written_scores_cost_bytes_and_their_masked_half():
    flash = predict(work(1), REAL)
    blocks = predict(work(1, attention=Attention.matmul), REAL)
    whole = predict(work(1, attention=Attention.fused_softmax), REAL)
    assert flash.step_seconds < blocks.step_seconds < whole.step_seconds


def test_an_op_takes_its_arithmetic_or_its_bytes_and_a_start():
    its = device(kernel=1e-6, attention=5e13)
    assert its.seconds(Op(MOVE, 2e9)) == pytest.approx(2e-3 + 1e-6)
    assert its.seconds(Op(ATTENTION, 1e6, 1e12)) == pytest.approx(1e12 / 5e13 + 1e-6)
    assert its.seconds(Op(ATTENTION, 1e12, 1e6)) == pytest.approx(1.0 + 1e-6)


def test_a_block_is_the_sum_of_its_ops():
    """What is computed again is all of a forward pass, or all whose results are not kept: here its products."""
    real = Links(REAL, Layout())
    none, selective, full = (
        model_seconds(work(1, activation_checkpointing=ActivationCheckpointing[mode]), device(), real)[1, OPS].tolist()
        for mode in ("none", "selective", "full")
    )
    ops = plain_profile(work(1)).blocks[0].ops
    assert none[0] == pytest.approx(sum(map(device().seconds, ops)))
    assert full[1] - none[1] == pytest.approx(none[0])
    moves = [op for op in ops if op.kind == MOVE]
    assert selective[1] - none[1] == pytest.approx(sum(map(device().seconds, moves)))
    assert 2 * GPT.d_model * 2048 * 2 * len(moves) < sum(op.moved for op in moves) < 40 * GPT.d_model * 2048 * 2


def links(sizes, cluster=REAL):
    return Links(cluster, Layout(sizes))


def test_ranks_lie_on_nodes_with_the_tensor_axis_innermost():
    its = links((2, 4, 2, 4))  # 64 ranks on 8 nodes of 8
    assert its.group("tp") == AxisPlacement(4, 4, 1)
    assert its.group("dp_shard") == AxisPlacement(2, 2, 1)
    assert its.group("dp_replicate") == AxisPlacement(4, 1, 4)
    assert its.group("pp") == AxisPlacement(2, 1, 2)
    assert its.group("world") == AxisPlacement(64, 8, 8)
    assert links((1, 1, 32, 2)).group("dp_shard") == AxisPlacement(32, 4, 8)
    assert links((1, 1, 2, 16)).group("tp") == AxisPlacement(16, 8, 2)


def test_a_ring_takes_its_bytes_over_the_slowest_link():
    inside = links((1, 1, 1, 8))
    expected = 2 * (7 / 8 * 1e9 / 200e9 + 7e-6)
    assert inside.once("all_reduce", 1e9, inside.group("tp")) == pytest.approx(expected)
    assert inside.once("all_gather", 1e9, inside.group("tp")) == pytest.approx(expected / 2)
    assert inside.seconds(Transfer("tp", "reduce_scatter", 8, 10**9, 3, "forward")) == pytest.approx(3 * expected / 2)
    assert inside.seconds(Transfer("pp", "recv", 2, 10**9, 3, "forward")) == 0.0


def test_a_groups_ranks_on_a_node_use_its_network_together():
    # 16 ranks on two nodes in one group: 8 cards of 20 GB/s, and no more than a device passes on inside the node.
    whole = links((1, 1, 16, 1))
    assert whole.once("all_gather", 16e9, whole.group("dp_shard")) == pytest.approx(15e9 / 160e9 + 7e-6 + 1e-5)
    # In groups of one rank a node: a card each.
    apart = links((1, 1, 2, 8))
    assert apart.once("all_gather", 2e9, apart.group("dp_shard")) == pytest.approx(1e9 / 20e9 + 1e-5)
    # A card for two devices halves that.
    cards = replace(REAL, inter=replace(REAL.inter, shared=2))
    shared = links((1, 1, 2, 8), cards)
    assert shared.once("all_gather", 2e9, shared.group("dp_shard")) == pytest.approx(1e9 / 10e9 + 1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_closed_form_of_a_pipeline_is_its_timeline(schedule):
    """Every pass laid out, over depths, virtual stages, micro-batches, a slower last stage and slow messages."""
    bar = 0.12 if schedule == "zbv" else 0.03
    compared, worst = 0, 0.0
    for ranks in (2, 4, 8):
        for virtual in (None,) if SCHEDULES[schedule].fixed else (2, 3):
            config = ParallelismConfig(pipeline=ranks, schedule=schedule, virtual_stages=virtual)
            for count in (ranks, 2 * ranks, 8 * ranks):
                if schedule_refuses(config, count):
                    continue
                for last, message in ((1.0, 0.0), (1.3, 0.0), (1.0, 0.1)):
                    forward = [1.0] * (num_stages(config) - 1) + [last]
                    backward = [2 * each for each in forward]
                    laid_out = timeline(config, count, forward, backward, message).seconds
                    busy = [3 * sum(forward[stage] for stage in stages_of_rank(config, rank)) for rank in range(ranks)]
                    closed = pipeline_seconds(config, count, forward, backward, busy, message)
                    worst, compared = max(worst, abs(closed / laid_out - 1)), compared + 1
    assert compared >= 18
    assert worst <= bar


def test_a_bubble_shrinks_with_virtual_stages_and_micro_batches():
    def bubble(**keys):
        found = predict(work(8, model=replace(GPT, vocab_size=128), batch=32, pipeline=8, **keys), IDEAL)
        return found.bubble_seconds / found.step_seconds

    once, twice = bubble(schedule="1f1b"), bubble(schedule="interleaved_1f1b", virtual_stages=2)
    assert once == pytest.approx(7 / 39, abs=0.02)  # 7 of 32 + 7
    assert twice < 0.65 * once
    assert bubble(schedule="zero_bubble", virtual_stages=2) < twice
    assert predict(work(8, zero=1), IDEAL).bubble_seconds == 0.0


def test_parts_of_a_step_add_up():
    for keys in ({"zero": 3}, {"tensor": 8, "sequence": True}, {"tensor": 2, "pipeline": 4, "zero": 1}):
        its = predict(work(16, **keys), REAL)
        parts = (its.compute_seconds, its.communication_seconds, its.bubble_seconds, its.optimizer_seconds)
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(its.step_seconds)


def test_zero_stages_cost_what_they_send_and_save_updates():
    tight = replace(REAL, overlap=0.0)
    stages = [predict(work(16, batch=64, zero=zero), tight) for zero in range(4)]
    # Two micro-batches and more: stage 2 reduces after each, stage 3 gathers for each pass too.
    assert stages[1].communication_seconds < stages[2].communication_seconds < stages[3].communication_seconds
    assert stages[1].optimizer_seconds == pytest.approx(stages[0].optimizer_seconds / 16, rel=0.1)


def test_a_reduction_more_for_each_micro_batch_starts_its_own_copies():
    """ZeRO 2 reduces each of 16 blocks, and what is left, after each micro-batch; ZeRO 1, once."""
    slow = replace(IDEAL, kernel_seconds=1.0)
    once, each = (predict(work(16, zero=zero), slow).communication_seconds for zero in (1, 2))
    assert each - once == pytest.approx(COPY_OPS * (64 / 16 - 1) * (16 + 1))


def test_communication_hides_behind_compute_as_far_as_the_cluster_says():
    shown = [predict(work(8, zero=1), replace(REAL, overlap=share)).communication_seconds for share in (0.0, 0.5, 1.0)]
    assert shown[0] > shown[1] > shown[2]
    slow = replace(REAL, overlap=1.0, intra=LinkConfig(gb_per_second=0.01))
    bare = replace(slow, overlap=0.0)
    hidden = predict(work(8, zero=0), bare).communication_seconds - predict(work(8, zero=0), slow).communication_seconds
    assert 0 < hidden < predict(work(8, zero=0), bare).compute_seconds  # no more than there is to hide behind


def test_tensor_parallelism_is_slow_across_nodes():
    inside, across = (predict(work(16, tensor=tensor), REAL) for tensor in (8, 16))
    assert across.communication_seconds > 3 * inside.communication_seconds
    assert predict(work(16, tensor=8, sequence=True), REAL).compute_seconds < inside.compute_seconds


def test_tokens_take_what_int64_does():
    its = work(2, micro=3, context=2)
    assert its.input_bytes == its.target_bytes == 3 * 1024 * torch.int64.itemsize


def test_sgd_updates_faster_than_adam():
    its = work(1)
    assert predict(replace(its, optimizer=SGDConfig()), REAL).optimizer_seconds < predict(its, REAL).optimizer_seconds


CPU = replace(
    REAL,
    device="cpu",
    devices_per_node=2,
    peak_tflops={"fp32": 0.1},
    matmul_efficiency={"fp32": 1.0},
    memory_gb_per_second=20.0,
    overlap=0.0,
)
SMALL = GPTConfig(num_layers=4, num_heads=8, d_model=256, vocab_size=4096, sequence_length=256)


def cpu(world, **keys):
    return predict(
        work(world, model=SMALL, batch=16, dtype="fp32", attention=Attention.fused, device="cpu", **keys), CPU
    )


def test_ranks_divide_a_cpus_cores():
    assert [rank_share(CPU, world) for world in (1, 2, 4)] == [1.0, 0.5, 0.5]
    assert [waiting_for_cores(CPU, world) for world in (1, 2, 4)] == [1.0, 1.0, 2.0]
    assert waiting_for_cores(replace(CPU, crowding=1.5), 4) == 3.0
    assert device_of(CPU, "fp32", 2).peak == pytest.approx(0.05e12)
    assert rank_share(REAL, 64) == waiting_for_cores(REAL, 64) == 1.0
    alone, two, four = (cpu(world, zero=1) for world in (1, 2, 4))
    # No more arithmetic than there are cores: two ranks halve the work and the speed.
    assert two.compute_seconds == pytest.approx(alone.compute_seconds, rel=0.05)
    assert four.compute_seconds == pytest.approx(two.compute_seconds, rel=0.05)
    assert alone.step_seconds < two.step_seconds < four.step_seconds
    assert alone.mfu == pytest.approx(alone.tokens_per_second * flops_per_token(SMALL, 256) / 0.1e12)


def test_ranks_that_share_a_core_fill_each_others_bubbles():
    two, four = cpu(2, pipeline=2), cpu(4, pipeline=4)
    assert two.bubble_seconds > 0
    assert four.bubble_seconds < 0.35 * four.step_seconds  # 3 of 16 + 3 idle passes, and half of the cores' time
    assert four.step_seconds < 1.5 * two.step_seconds


def test_an_unknown_dtype_is_refused_with_the_key():
    with pytest.raises(
        ConfigError, match=r"cluster.peak_tflops has no value for fp16 \(it has bf16\); give \+cluster.peak_tflops"
    ):
        predict(work(1, dtype="fp16"), REAL)


def test_attention_takes_what_was_measured_in_its_dtype():
    """Of a dtype that was not measured, a share of the peak."""
    both = replace(IDEAL, device="cpu", nodes=1, devices_per_node=4, peak_tflops={"bf16": 100.0, "fp32": 20.0})
    both = replace(both, attention_efficiency=0.5, attention_tflops={"fp32": 16.0})
    assert device_of(both, "fp32", 4).attention == pytest.approx(16e12 / 4)
    assert device_of(both, "bf16", 4).attention == pytest.approx(50e12 / 4)


def test_what_training_takes_and_costs():
    its = predict(work(8), REAL)
    assert cost_per_billion_tokens(its, REAL, 8) is None
    paid = replace(REAL, dollars_per_device_hour=2.0)
    hours = 1e9 / its.tokens_per_second / 3600
    assert cost_per_billion_tokens(its, paid, 8) == pytest.approx(16 * hours)
    assert cost_per_billion_tokens(its, replace(paid, device="cpu"), 8) == pytest.approx(2 * hours)


def test_a_prediction_takes_milliseconds():
    """A search makes thousands."""
    large = replace(GPT, num_layers=96, num_heads=96, d_model=12288)
    its = work(1024, model=large, batch=1536, tensor=8, pipeline=8, sequence=True, zero=1)
    memory, times = most(its), []
    for _ in range(10):
        start = time.process_time()
        predict(its, REAL, memory)
        times.append(time.process_time() - start)
    assert min(times) < 0.006  # 1 to 2 ms on a quiet machine


def slow_host(**changes):
    """Copies of 1 GB/s that hide behind nothing, a host of 8 GB/s, a disk of 0.8 GB/s, both for 8 ranks."""
    rates = {"host_link_gb_per_second": 1.0, "host_memory_gb_per_second": 8.0, "disk_gb_per_second": 0.8}
    return replace(IDEAL, **({"overlap": 0.0} | rates | changes))


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_offload_by_hand(offload):
    """ZeRO 3 on 8 ranks, one micro-batch: shards go there for the forward and for the backward pass, but for what
    stays gathered; gradients come back once; the host reads and writes 40 bytes a parameter, the disk 16."""
    given = work(8, batch=8, zero=3, offload=Offload[offload])
    plain = work(8, batch=8, zero=3)
    found = predict(given, slow_host())
    none = predict(plain, slow_host())
    shard = sum(each.shard(8) for stage in stages(given, 0) for each in stage.parameters())
    block = sum(each.shard(8) for each in stages(given, 0)[0].kinds[0])
    copied = 4 * (shard + GPT.num_layers * block + shard)
    assert found.communication_seconds - none.communication_seconds == pytest.approx(copied / 1e9, rel=1e-3)
    each = 40 * shard / 1e9 if offload == "cpu" else 16 * shard / 1e8
    assert found.optimizer_seconds == pytest.approx(each, rel=1e-2)  # the tables are cut a little unevenly
    hidden = predict(given, slow_host(overlap=1.0, host_link_gb_per_second=100.0))
    assert hidden.communication_seconds == pytest.approx(predict(plain, slow_host(overlap=1.0)).communication_seconds)
