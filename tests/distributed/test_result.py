"""The figures of result.json that a sweep compares, from real ranks."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_files import read_metrics

from distributed.cells.run import Ranks
from gptlite.metrics.meter import Throughput
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.monitor.comm_time import CommunicationTime
from gptlite.satellites.monitor.memory_report import CATEGORIES, MemoryReport
from gptlite.trainer.report import Reporter
from gptlite.trainer.step import StepResult

ONE = Mesh(torch.device("cpu"))


@pytest.mark.slow
def test_a_pipeline_tells_of_every_rank(two: Ranks, tiny: list[str], tmp_path: Path):
    layout = ["parallelism.pipeline=2", "data.micro_batch_size=1", "model.num_layers=3"]
    assert two.run("distributed.cells.steps:train", [*tiny, *layout, f"run.dir={tmp_path / 'a'}"], timeout=150) == [
        0,
        0,
    ]
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    rows = [row for row in read_metrics(tmp_path / "a") if "loss" in row]
    assert (result["world_size"], result["layout"]) == (2, "pipeline 2, 1f1b")
    assert result["loss"] == rows[-1]["loss"]
    assert result["step_seconds"] == pytest.approx(4 * 32 / result["tokens_per_second"])
    assert result["tokens_per_second"] == sorted(row["tokens_per_second"] for row in rows)[4]
    assert set(result["comm_seconds"]) == {"pp", "world"}
    assert 0 < sum(result["comm_seconds"].values()) <= result["step_seconds"] * (1 + 1e-9)  # to rounding
    ranks = result["memory_ranks"]
    assert len(ranks) == 2
    for name in CATEGORIES:
        assert rows[-1][f"memory_{name}_bytes"] == max(rank[name] for rank in ranks)
    assert ranks[0]["parameters"] != ranks[1]["parameters"]  # two layers and the embedding, one layer and the head
    assert all(rank["peak"] > 100e6 for rank in ranks)
    assert ranks[0]["peak"] == rows[-1]["memory_peak_bytes"]
    assert all(50e6 < rank["average"] <= rank["peak"] for rank in ranks)
    assert all(0 < rank["utilization"] <= 1 for rank in ranks)
    assert result["memory_average_bytes"] == ranks[0]["average"]
    told = result["pipeline"]
    assert (told["schedule"], told["ranks"], told["stages_per_rank"], told["micro_batches"]) == ("1f1b", 2, 1, 4)
    assert told["layers"] == [2, 1]
    layer, head = 6 * (12 * 32**2 + 32 * 32), 6 * 32 * 257
    assert told["stage_flops"] == [2 * layer, layer + head]


@pytest.mark.parametrize("seconds", [(4, 1, 2), (1, 2, 8)], ids=["of the last row", "of another"])
def test_figures_are_at_the_median_speed(monkeypatch: pytest.MonkeyPatch, seconds: tuple[int, ...]):
    now = [0.0]
    throughput = Throughput(
        tokens_per_step=100, samples_per_step=1, flops_per_token=6, peak_flops=3000.0, clock=lambda: now[0]
    )
    report = MemoryReport(ONE, 3)
    reporter = Reporter([], throughput, 3, lambda _: None, observers=(report,))
    monkeypatch.setattr(throughput, "eta_seconds", lambda _: None)
    none = reporter.figures()
    assert none.pop("memory_peak_bytes") > 0
    assert none == dict.fromkeys(none, None) | {"comm_seconds": {}, "memory_ranks": [], "spikes": []}
    state: Any = SimpleNamespace(
        step=1, tokens=100, runner=SimpleNamespace(mesh=ONE), remaining_batches=float, steps_until=int
    )
    for loss, taken in zip((3.0, 2.0, 1.0), seconds, strict=True):  # a quarter of each step in tp
        now[0] += taken
        throughput.step()
        result = StepResult(loss, 1.0, 0.1, step=1, tokens=100)
        reporter.step(state, result, lambda seconds: {"comm_seconds_tp": seconds / 4})
    found = reporter.figures()
    assert (found["loss"], found["tokens_per_second"], found["step_seconds"]) == (1.0, 50.0, 2.0)
    assert found["mfu"] == pytest.approx(50 * 6 / 3000)
    assert found["comm_seconds"] == {"tp": 0.5}
    ((rank),) = found["memory_ranks"]
    assert rank["peak"] > 0
    assert [rank[name] for name in CATEGORIES] == [None] * 4  # no step was measured
    reporter.close()


def test_what_is_not_known_of_a_rank_is_none():
    with closing(MemoryReport(ONE, 3)) as report:
        assert report.ranks() == []
        report.gather(None, None, None)
        assert report.ranks() == [dict.fromkeys((*CATEGORIES, "peak", "average", "utilization"))]
        report.gather(7, 5, 0.25)
        assert [report.ranks()[0][name] for name in ("peak", "average", "utilization")] == [7, 5, 0.25]


def test_the_first_row_of_shares_does_not_outlive_itself():
    times = CommunicationTime(ONE)
    times.add("tp", 9.0)
    times.add(None, 1.0)
    assert times._shares()[0][0] == pytest.approx(0.9)  # while the ranks found each other
    times.add("tp", 1.0)
    times.add(None, 9.0)
    assert times._shares()[0][0] == pytest.approx(0.1)
    times.add(None, 10.0)
    share = times._shares()[0][0]
    assert 0.03 < share < 0.05  # smoothed over the rows since
