"""The search looks at legal layouts alone, keeps what it is given, and what it proposes composes to the same run."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from gptlite.commands.plan import planned_config
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.parallelism.config import ActivationCheckpointing, Offload
from gptlite.parallelism.layout import resolve
from gptlite.satellites.plan import walk
from gptlite.satellites.plan.capacity import least_activations, least_bytes, rank_memory
from gptlite.satellites.plan.cost import Costs, predict
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.planning import apply, chosen, fixed_keys, make_plan, overrides, space_of
from gptlite.satellites.plan.search import ERROR, UNKNOWN, distinct, equals, layouts, search, workloads
from gptlite.satellites.plan.timeline import order
from gptlite.satellites.plan.traffic import file_bytes

MODEL = [
    "data=synthetic",
    "model=gpt-lite",
    "model.num_layers=4",
    "model.num_heads=8",
    "model.d_model=256",
    "model.sequence_length=512",  # from which on larger micro-batches are not recorded, but extrapolated
]
BATCH = ["data.global_batch_size=32"]
# So wide that most memory is that of the model state.
PAIR = ["cluster.devices_per_node=2", "data.micro_batch_size=1", "data.vocab_size=500", "model.d_model=1024"]
CLUSTER = ["cluster=dgx-h100", "cluster.devices_per_node=4"]


def config_of(*given):
    return planned_config([*MODEL, *BATCH, *CLUSTER, *given])


def silent(text):
    pass


def legal(config):
    """Every legal layout of a configuration's cluster."""
    world = (config.cluster.nodes or 1) * config.cluster.devices_per_node
    space = space_of(config, config.cluster, fixed_keys(config))
    return [work for work, reason in workloads(space, config.cluster, world) if not reason]


@pytest.fixture(scope="module")
def plan():
    return make_plan(config_of("model.num_heads=2"), log=silent)


@pytest.fixture(scope="module")
def sizes():
    """The legal layouts of two devices, each with the memory that it takes."""
    works = legal(config_of(*PAIR))
    return [(work, most(work)[1].total) for work in works]


def test_every_combination_of_degrees_is_looked_at_once():
    config = config_of()
    space = space_of(config, config.cluster, fixed_keys(config))
    found = list(layouts(space, config.cluster, 4))
    words = Counter(map(repr, found))
    assert max(words.values()) == 1
    degrees = {(each.tensor, each.pipeline, each.data) for each in found}
    assert degrees == {(t, p, 4 // t // p) for t in (1, 2, 4) for p in (1, 2, 4) if 4 % (t * p) == 0}
    assert {each.zero for each in found if each.data > 1} == {0, 1, 2, 3}
    assert {each.zero for each in found if each.data == 1} == {0}
    modes = set(ActivationCheckpointing) - {ActivationCheckpointing.offload}
    assert {each.activation_checkpointing for each in found} == modes
    assert {each.schedule for each in found if each.pipeline > 1} == {
        *("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")
    }


@pytest.mark.parametrize(
    ("layers", "counts"),
    [
        (24, {2: {2, 3, 4, 6, 12}, 4: {2, 3, 4, 6}}),  # 4 leaves stages of one layer and of two
        (10, {2: {2, 3, 4, 5}, 4: {2}}),
        (4, {4: {2}}),  # which the checks refuse in words
    ],
)
def test_all_virtual_stages_that_divide_are_looked_at(layers, counts):
    config = config_of(f"model.num_layers={layers}")
    found = list(layouts(space_of(config, config.cluster, fixed_keys(config)), config.cluster, 4))
    for pipeline, expected in counts.items():
        split = {1} | {count for count in expected if count * pipeline <= layers}  # one is ZB-H1, or else 1F1B
        for schedule, stages in (("interleaved_1f1b", expected), ("zero_bubble", split)):
            its = (each for each in found if (each.pipeline, each.schedule) == (pipeline, schedule))
            assert {each.virtual_stages for each in its} == stages, (pipeline, schedule)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(("model.num_layers=8",), marks=pytest.mark.slow),
        ("data.micro_batch_size=2", "model.num_layers=9", "model.tied_embeddings=false", "parallelism.bucket_layers=2"),
        ("data.micro_batch_size=2", "model.dropout=0.1"),
        ("parallelism.offload=cpu", "model.sequence_length=4096", "data.micro_batch_size=2"),
        ("model.num_layers=8", "cluster.devices_per_node=2", "cluster.nodes=4", "parallelism.tensor=1"),  # HSDP
    ],
)
def test_what_layouts_share_changes_no_number(given):
    """Each layout is priced as if it were alone."""
    config = config_of(*given)
    costs, works = Costs(config.cluster), legal(config)
    assert len(works) > 100
    for number, work in enumerate(works):
        shared = costs.predict(work, UNKNOWN)
        if number % 4 == 0:  # over time, each micro-batch, recomputation and degree
            assert shared == predict(work, config.cluster, UNKNOWN), work


def test_a_search_finds_what_is_predicted_of_each_layout_alone(plan):
    assert len(plan.found.ranked) > 10
    for each in plan.found.ranked:
        assert each.prediction == predict(each.work, plan.cluster), each.words


def test_a_schedule_is_laid_out_once_not_for_each_layout(plan, monkeypatch):
    laid_out = []

    def counted(config, rank, micro_batches):
        laid_out.append((config.schedule, config.pipeline, config.virtual_stages, rank, micro_batches))
        return order(config, rank, micro_batches)

    monkeypatch.setattr(walk, "order", counted)
    vars(walk.turns)["cache_clear"]()
    found = make_plan(plan.config, log=silent).found
    assert max(Counter(laid_out).values()) <= 2  # for time, and for memory
    assert len(laid_out) < found.tried / 4
    assert found.ranked == plan.found.ranked


def test_equals_are_within_the_error_of_the_fastest(plan):
    alike, first = equals(plan.found), plan.best.prediction.step_seconds
    assert alike == plan.found.ranked[: len(alike)]
    assert 1 < len(alike) < len(plan.found.ranked)
    assert alike[-1].prediction.step_seconds <= (1 + ERROR) * first
    assert plan.found.ranked[len(alike)].prediction.step_seconds > (1 + ERROR) * first


def test_tensor_parallelism_stays_inside_a_node():
    config = config_of("cluster.devices_per_node=2", "cluster.nodes=4")
    space = space_of(config, config.cluster, fixed_keys(config))
    assert {each.tensor for each in layouts(space, config.cluster, 8)} == {1, 2}


@pytest.mark.parametrize(
    ("given", "key", "values"),
    [
        ("parallelism.tensor=2", "tensor", {2}),
        pytest.param("parallelism.pipeline=4", "pipeline", {4}, marks=pytest.mark.slow),
        ("parallelism.zero=3", "zero", {3}),
        ("parallelism.data=2", "data", {2}),
        ("parallelism.schedule=gpipe", "schedule", {"gpipe", "1f1b"}),  # the default where there is no pipeline
        pytest.param(
            "parallelism.activation_checkpointing=full",
            "activation_checkpointing",
            {ActivationCheckpointing.full},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_given_stays(given, key, values):
    found = make_plan(config_of(given, "model.num_heads=2"), log=silent, wanted=10).found
    assert {getattr(each.work.parallelism, key) for each in found.ranked} == values


def test_a_given_micro_batch_stays():
    found = make_plan(config_of("data.micro_batch_size=2", "model.num_heads=2"), log=silent, wanted=1).found
    assert {each.work.micro_batch_size for each in found.ranked} == {2}


def test_fastest_first_and_all_of_them_legal(plan):
    times = [each.prediction.step_seconds for each in plan.found.ranked]
    assert times == sorted(times)
    assert plan.found.tried == len(times) + sum(plan.found.pruned.values()) + plan.found.slower
    for each in plan.found.ranked[:: max(1, len(times) // 40)]:
        assert each.work.layout == resolve(each.work.parallelism, 4)
        assert each.work.global_batch_size % (each.work.micro_batch_size * each.work.layout.data_size) == 0


def test_what_does_not_fit_is_pruned_with_the_figures():
    few = ("data.vocab_size=500", "data.micro_batch_size=2", "parallelism.tensor=1")
    config = config_of("cluster.memory_gib=2.1", *few)  # 0.1 GiB
    found = make_plan(config, log=silent).found
    limit = rank_memory(config.cluster, 4)
    assert limit == pytest.approx(0.1 * 2**30)
    assert found.pruned["does not fit"] > 0
    assert re.fullmatch(r"0.\d GiB (on the fullest|per) rank.*; 0.1 GiB available", found.examples["does not fit"])
    assert all(each.prediction.memory.total <= limit for each in found.ranked)


def test_the_override_line_composes_to_the_candidate(plan):
    """Else the command that a plan prints would train another layout."""
    for each in plan.found.ranked[:: max(1, len(plan.found.ranked) // 8)]:
        config = load([*MODEL, "model.num_heads=2", *BATCH, *overrides(each.work)])
        its = each.work.parallelism
        if its.pipeline == 1:
            its.schedule, its.virtual_stages = "1f1b", None
        its.auto = False
        assert config.parallelism == its
        assert config.data.micro_batch_size == each.work.micro_batch_size


def test_distinct_has_one_of_each_kind(plan):
    few = distinct(plan.found, 5)
    kinds = {
        (e.work.parallelism.tensor, e.work.parallelism.pipeline, e.work.layout.data_size, e.work.parallelism.zero)
        for e in few
    }
    assert len(few) == len(kinds) == 5
    assert few[0] == plan.best
    degrees = [(e.work.parallelism.tensor, e.work.parallelism.pipeline) for e in distinct(plan.found, 100)]
    assert degrees.count((1, 1)) == 4  # the stages of ZeRO


def test_what_is_slower_is_not_asked_whether_it_fits(plan):
    """The layouts equal to the fastest, and as many kinds as are wanted."""
    found = make_plan(plan.config, log=silent, wanted=2).found
    assert found.slower > 0
    assert found.tried == len(found.ranked) + sum(found.pruned.values()) + found.slower
    assert found.ranked[0] == plan.best
    assert equals(found) == equals(plan.found)
    assert len(distinct(found, 100)) == max(2, len(distinct(replace(found, ranked=equals(found)), 100)))


def shares_of_the_least(sizes):
    """By which bound the search leaves layouts out before it prices them, over what they take."""
    return [(least_bytes(work) + least_activations(work)) / size for work, size in sizes]


def test_no_layout_takes_less_than_the_least_it_may_take(sizes):
    assert 0.5 < max(shares_of_the_least(sizes)) <= 1  # below, the bound would be no help


@pytest.mark.slow
def test_no_layout_of_four_devices_takes_less_than_the_least_it_may_take():
    assert max(shares_of_the_least([(work, most(work)[1].total) for work in legal(config_of())])) <= 1


def test_auto_takes_the_best(plan):
    config = chosen(plan.config, log=silent)
    assert config == apply(plan.config, plan.best)
    assert not config.parallelism.auto
    assert resolve(config.parallelism, 4).world_size == 4


def test_auto_on_another_world_than_the_clusters():
    assert resolve(chosen(config_of(), world=2, log=silent).parallelism, 2).world_size == 2


def test_on_a_cpu_fewer_ranks_are_looked_at_too(tmp_path):
    few = ("parallelism.tensor=1", "data.micro_batch_size=1", "precision=fp32")
    config = load(["parallelism=auto", *MODEL, *BATCH, "cluster.device=cpu", *few])
    worlds = {each.work.layout.world_size for each in make_plan(config, log=silent, wanted=1).found.ranked}
    assert 1 in worlds


def test_a_cluster_that_is_too_small_says_by_how_much_and_what_would_do():
    fixed = ("parallelism.tensor=1", "parallelism.schedule=1f1b", "data.micro_batch_size=1", "cluster.disk_path=null")
    config = planned_config(["model=gpt3-175b", "data=synthetic", "data.global_batch_size=64", *CLUSTER, *fixed])
    smallest = r"of \d+ layouts the smallest .* GiB on a rank, .* more than .*"
    with pytest.raises(ConfigError, match=rf"gpt3-175b does not fit .*{smallest}cluster.nodes=\d+") as refusal:
        make_plan(config, log=silent)
    nodes = int(str(refusal.value).rpartition("cluster.nodes=")[2])
    config.cluster.nodes = nodes // 2
    with pytest.raises(ConfigError):
        make_plan(config, log=silent)
    config.cluster.nodes = nodes
    assert make_plan(config, log=silent, wanted=1).best


def test_where_no_layout_is_legal_the_checks_say_why():
    config = config_of("data.global_batch_size=3")
    space = space_of(config, config.cluster, frozenset({"tensor", "pipeline"}))
    with pytest.raises(ConfigError, match=r"no layout of 4 ranks is legal: data.global_batch_size=3 = "):
        search(space, config.cluster, 4)


@pytest.mark.slow
def test_the_smallest_layout_is_the_smallest(sizes):
    """Where all are refused for their model state, too: its mean over ranks says nothing of the fullest one."""
    none = ("cluster.memory_gib=0.01", "cluster.reserved_gib=0")
    config = config_of(*PAIR, *none)
    found = search(space_of(config, config.cluster, fixed_keys(config)), config.cluster, 2)
    assert found.smallest is not None
    assert found.smallest[0].total == min(size for _, size in sizes)


@pytest.mark.slow
def test_offload_is_looked_for_where_nothing_fits_without():
    """A model of 100 million parameters on four devices, of less and less memory."""
    big = ("model.d_model=1024", "model.num_layers=8", "data.vocab_size=500", "data.global_batch_size=4")

    def found(gib: float, *more: str):
        config = config_of(*big, f"cluster.memory_gib={gib}", "cluster.reserved_gib=0", *more)
        return search(space_of(config, config.cluster, fixed_keys(config)), config.cluster, 4)

    given = "parallelism.offload=none"
    without, offloaded = found(0.01, given).smallest, found(0.01, "parallelism.offload=cpu").smallest
    assert found(0.01).smallest == without  # nothing fits: what would do without offload
    assert without is not None
    assert offloaded is not None
    assert offloaded[1].parallelism.offload is Offload.cpu
    assert offloaded[0].total < without[0].total
    between = (without[0].total + offloaded[0].total) / 2 / 2**30
    assert found(between, given).ranked == []
    ranked = found(between).ranked
    assert {each.work.parallelism.offload for each in ranked} == {Offload.cpu}
    assert all(most(each.work)[1].total <= between * 2**30 for each in ranked)
    assert "parallelism.offload=cpu" in overrides(ranked[0].work)
    assert {each.work.parallelism.offload for each in found(80).ranked} == {Offload.none}
    host = ranked[0].prediction.memory.host
    no_disk = "cluster.disk_path=null"
    assert found(between, no_disk, "cluster.host_memory_gib=null").ranked == []
    short = f"cluster.host_memory_gib={0.9 * 4 * host / 2**30}"
    assert found(between, no_disk, short).ranked == []
    ranked = found(between, "cluster.disk_path=/nvme", short).ranked  # parameters and gradients there, moments on disks
    assert {each.work.parallelism.offload for each in ranked} == {Offload.nvme}
    assert {"parallelism.offload=nvme", "parallelism.offload_path=/nvme"} <= set(overrides(ranked[0].work))
    files = max(4 * file_bytes(each.work, rank) for each in ranked for rank in range(each.work.layout.size("pp")))
    assert found(between, "cluster.disk_path=/nvme", short, f"cluster.disk_gib={1.01 * files / 2**30}").ranked
    assert found(between, "cluster.disk_path=/nvme", short, "cluster.disk_gib=0.001").ranked == []


def test_parameters_in_files_leave_zero_3() -> None:
    files = ["offload=nvme", "offload_path=/nvme", "offload_parameters=true", "tensor=1", "pipeline=1"]
    plan = make_plan(config_of(*(f"parallelism.{each}" for each in files)), log=silent)
    assert {candidate.work.parallelism.zero for candidate in plan.found.ranked} == {3}
    with pytest.raises(ConfigError, match=r"parallelism\.zero=1 does not; use parallelism\.zero=3"):
        make_plan(config_of(*(f"parallelism.{each}" for each in [*files, "zero=1"])), log=silent)
