"""Compressed communication as planned is what real ranks send and keep, and the search and the step time know it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from distributed.cells.run import Ranks

from gptlite.commands.plan import planned_config
from gptlite.config import load
from gptlite.config.cluster import ClusterConfig, LinkConfig
from gptlite.errors import ConfigError
from gptlite.parallelism.config import Compression, ZeroppConfig
from gptlite.parallelism.layout import Layout as Degrees
from gptlite.satellites.compressed.codecs import CODECS
from gptlite.satellites.plan.compression import is_compressed, steps_of_run, touched_bytes
from gptlite.satellites.plan.cost import predict
from gptlite.satellites.plan.hardware import Links
from gptlite.satellites.plan.links import DENSE, ONEBIT, SPEEDS, link_curves
from gptlite.satellites.plan.memory import estimate, most
from gptlite.satellites.plan.planning import chosen, fixed_keys, make_plan, space_of
from gptlite.satellites.plan.report import report_links, simulated, write_links
from gptlite.satellites.plan.search import workloads
from gptlite.satellites.plan.traffic import data_bytes, run_bytes, transfers
from gptlite.satellites.plan.workload import ACROSS, INSIDE, Transfer
from plan.truth import workload
from plan.truth_layouts import COMPRESSED, Layout
from plan.truth_table import Row, run

QUICK = [COMPRESSED[0], COMPRESSED[4]]
SMALL = "data=synthetic data.vocab_size=500 data.global_batch_size=32 model=gpt-lite model.num_layers=4".split()
SMALL += ["model.d_model=256", "model.sequence_length=512", "cluster=dgx-h100", "cluster.devices_per_node=4"]
MACHINES = "data=synthetic data.vocab_size=4096 model=gpt-lite cluster=cpu precision=fp32 cluster.devices_per_node=1"
MACHINES = [*MACHINES.split(), "data.global_batch_size=8", "data.micro_batch_size=4"]


def silent(text: str) -> None:
    pass


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


def wrong(rows: list[Row]) -> list[str]:
    """Those in which anything sent or kept differs, or other memory by more than the planner's error."""
    return [
        f"{row.layout.name} {row.place}: {row.error:+.1%}, {row.predicted}, {row.counted}, {row.wrong}"
        for row in rows
        if row.wrong or row.predicted.compression != row.counted.compression or abs(row.error) > 0.05
        or abs(row.state_error) > 1e-3
    ]  # fmt: skip


def test_real_ranks_send_and_keep_what_is_planned():
    """Errors, masks, roots and copies in nodes to the byte, and every transfer."""
    rows = list(run(QUICK))
    assert wrong(rows) == []
    assert all(row.counted.compression > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_more_layouts_send_and_keep_what_is_planned(world: int):
    assert wrong(list(run(each for each in COMPRESSED if each.world == world and each not in QUICK))) == []


RUNS = [
    "micro=4 optimizer=onebit_adam freeze=2",
    "zero=1 micro=4 optimizer=zero_one_adam freeze=5 scaler=2",
    "micro=4 optimizer=zero_one_adam freeze=2 clipper=4 doubling=2",
]


@pytest.mark.parametrize("words", [RUNS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in RUNS[1:])])
def test_the_mean_over_a_run_is_that_of_its_steps(words: str):
    """0/1 Adam sums densely in steps 1, 2 and 4; with ZeRO 1, moments are gathered after each of the last two. With
    steps without an exchange, it exchanges in steps 3, 4 and 6."""
    config = Layout(2, words).config()
    config = replace(config, trainer=replace(config.trainer, max_steps=7))
    with Ranks(2) as ranks:
        (sent, _) = ranks.run("plan.truth:data_bytes_of_steps", config, 7, timeout=200)
    work = workload(config, 2)
    dense, alone = 3 if "scaler" in words else 2, 2 * ("clipper" in words)
    assert steps_of_run(work) == (dense, 7 - dense - alone, alone, dense - 1)
    assert run_bytes(work, 0) == pytest.approx(sum(sent) / 7, rel=1e-12)
    assert sent[0] == data_bytes(transfers(work, 0))
    assert sent[5] == data_bytes(transfers(replace(work, exchanging=True), 0))
    assert sent[-1] == data_bytes(transfers(replace(work, exchanging=True, alone=alone > 0), 0))
    assert sent[-1] < sent[0] / (1.5 if "zero=1" in words else 20)


def test_one_bit_adam_sends_less_than_a_fifth_of_dense_bytes_at_15_percent_warm_up():
    config = load([*MACHINES, "optimizer=onebit_adam", "trainer.max_steps=1000", "run.dir=unused"])
    work = workload(config, 2)
    assert steps_of_run(work)[:2] == (150, 850)
    assert run_bytes(work, 0) / data_bytes(transfers(work, 0)) == pytest.approx(0.1775, abs=3e-4)


def test_a_single_data_rank_sends_nothing_compressed():
    for words in ("compression=int8", "optimizer=onebit_adam freeze=1"):
        work = workload(Layout(1, words).config(), 1)
        assert transfers(work, 0) == []
        assert not is_compressed(work)
        assert estimate(work, 0).compression == 0


def test_memory_on_a_device_and_on_the_host():
    """4 bytes per parameter, 4 / N with replicas, and in the host's memory with offload."""
    work = replace(workload(Layout(4, "zero=2 micro=1").config(), 4), device="cuda")
    parameters = estimate(replace(work, layout=Degrees((1, 1, 1, 1))), 0).parameters / 4
    int8 = replace(work, parallelism=replace(work.parallelism, compression=Compression.int8))
    assert estimate(int8, 0).compression == pytest.approx(4 * parameters, rel=0.15)
    assert estimate(int8, 0).total > estimate(work, 0).total + 4 * parameters
    replicas = Layout(4, "zero=2 copies=2 micro=1 compression=int8")
    assert estimate(workload(replicas.config(), 4), 0).compression == pytest.approx(2 * parameters, rel=0.15)
    offloaded = Layout(4, "zero=2 micro=1 offload=cpu compression=int8")
    host = estimate(replace(workload(offloaded.config(), 4), device="cuda"), 0)
    assert host.compression == 0
    dense = estimate(replace(workload(Layout(4, "zero=2 micro=1 offload=cpu").config(), 4), device="cuda"), 0)
    assert host.host - dense.host == estimate(int8, 0).compression


def test_nodes_are_placed_on_the_cluster():
    """Eight ranks as four nodes of two on two machines of four: within nodes by the fast link, across by the other."""
    links = Links(
        ClusterConfig(devices_per_node=4, nodes=2, inter=LinkConfig(gb_per_second=0.1)), Degrees((1, 1, 8, 1))
    )
    assert (links.group(INSIDE, 2).inside, links.group(INSIDE, 2).nodes) == (2, 1)
    assert (links.group(ACROSS, 4).inside, links.group(ACROSS, 4).nodes) == (2, 2)
    within = links.seconds(Transfer(INSIDE, "all_to_all", 2, 1e9, 1, "backward"))
    assert links.seconds(Transfer(ACROSS, "all_to_all", 4, 1e9, 1, "backward")) > 3 * within


def test_codecs_move_bytes_in_proportion_to_values_not_to_messages():
    moved = {}
    for name in ("int8", "int4"):
        work = workload(Layout(2, f"zero=2 micro=2 compression={name}").config(), 2)
        message = CODECS[name].message_bytes(100)
        moved[name] = touched_bytes(work, Transfer("dp_shard", "all_to_all", 2, 2 * message, 1, "backward"))
    assert moved["int8"] == moved["int4"] == 4 * (6 + 9 / 2) * 2 * 100 * 256


def test_zeropp_is_planned_with_its_options_and_refuses_other_stages():
    options = ["parallelism.zeropp.weights=int8", "parallelism.zeropp.secondary=true", "cluster.nodes=2"]
    plan = make_plan(planned_config([*SMALL, "parallelism.pipeline=1", "parallelism.tensor=1", *options]), log=silent)
    assert plan.found.ranked
    for each in plan.found.ranked:
        assert each.work.parallelism.zero == 3
        assert each.work.parallelism.zeropp == ZeroppConfig(Compression.int8, True)
        assert each.prediction.memory.compression > 0
    assert "zeropp.secondary=true with parallelism.zero=0, which gathers" in plan.found.examples["illegal"]
    assert "simulates dense gathers" in refusal(lambda: simulated(plan))


def test_auto_keeps_compression_and_excludes_what_a_run_refuses():
    config = load([*SMALL, "parallelism=auto", "parallelism.compression=int4", "run.dir=unused"])
    best = chosen(config, 4, log=silent)
    assert best.parallelism.compression is Compression.int4
    assert best.parallelism.data is not None
    moe = planned_config([*SMALL, "model.moe.experts=4", "parallelism.compression=int4", "parallelism.tensor=1"])
    every = list(workloads(space_of(moe, moe.cluster, fixed_keys(moe)), moe.cluster, 4))
    assert {work.parallelism.expert for work, reason in every if not reason} == {1}
    assert any("parallelism.compression=int4 with parallelism.expert=2" in reason for _, reason in every)


def test_one_bit_adam_is_planned_for_the_stages_that_it_allows():
    config = planned_config([*SMALL, "optimizer=onebit_adam", "parallelism.tensor=1", "parallelism.pipeline=1"])
    found = make_plan(config, log=silent).found
    assert {each.work.parallelism.zero for each in found.ranked} <= {0, 1}
    assert "optimizer=onebit_adam" in found.examples["illegal"]


def test_a_predicted_step_is_the_mean_of_dense_and_exchanging_ones():
    work = workload(load([*MACHINES, "optimizer=onebit_adam", "trainer.max_steps=100", "run.dir=unused"]), 2)
    cluster = ClusterConfig(device="cpu", nodes=2, devices_per_node=1, peak_tflops={"fp32": 0.1}, overlap=0.0,
                            inter=LinkConfig(gb_per_second=0.01))  # fmt: skip
    mean, memory = predict(work, cluster), most(work)
    later = predict(replace(work, exchanging=True), cluster, memory)
    warm_up = predict(replace(work, steps=15), cluster, memory)  # a run that ends with it
    assert mean.step_seconds == pytest.approx(0.15 * warm_up.step_seconds + 0.85 * later.step_seconds)
    assert mean.tokens_per_second == pytest.approx(work.tokens / mean.step_seconds)
    assert warm_up.step_seconds - later.step_seconds == pytest.approx(2 * 4.2e6 * 4 / 2 * 2 / 2 / 1e7, rel=0.05)


def test_compression_pays_over_slow_links_alone(tmp_path: Path):
    """The rest of the step is equal, so slow links have the ratio of bytes, and fast ones that of the codecs' time."""
    rows = [{"link": "100mbit", "run": DENSE, "seconds": 3.0}, {"link": "none", "run": DENSE, "seconds": 1.0}]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, {"link": "100mbit", "run": "int8", "seconds": 1.5}]))
    config = planned_config([*MACHINES, "cluster.nodes=2"])
    curves = link_curves(config, tmp_path / "rows.json", silent)
    assert list(curves.curves) == [DENSE, "bf16", "int8", "int4", "powersgd", ONEBIT]
    for name, ratio in (("bf16", 2), ("int8", 3.9), ("int4", 7.8), (ONEBIT, 31)):
        gains = curves.gains(name)
        assert ratio / 1.6 < gains[0] < ratio
        assert gains == sorted(gains, reverse=True)
        assert gains[-1] < 1.05
        below = curves.pays_below(name)
        assert below is not None
        assert SPEEDS[0] < below < SPEEDS[-1]
    assert curves.curves["int8"].measured == ((0.1, 1.5),)
    assert curves.curves[DENSE].measured == ((0.1, 3.0),)
    assert f"({curves.gains('int8')[20]:.1f}x)" in report_links(curves)
    assert write_links(curves, tmp_path / "out").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.nodes=1"], "links=true varies the link between nodes, and cluster=cpu has one"),
        (
            ["cluster.nodes=2", "measured=/nowhere"],
            "measured=/nowhere has no rows of a benchmark",
        ),
        (["cluster.nodes=3"], "data.global_batch_size=8"),
        (["cluster.nodes=2", "parallelism.zero=2"], ""),
    ],
)
def test_links_that_cannot_be_varied(words: list[str], message: str):
    config = planned_config([*MACHINES, *(each for each in words if not each.startswith("measured"))])
    if not message:
        curves = link_curves(config, None, silent)
        assert list(curves.curves) == [DENSE, "bf16", "int8", "int4"]
        assert "parallelism.zero=2 frees" in curves.refused[ONEBIT]
        return
    file = next((each.partition("=")[2] for each in words if each.startswith("measured")), None)
    assert message in refusal(lambda: link_curves(config, Path(file) if file else None, silent))
