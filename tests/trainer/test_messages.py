"""What a run prints for a person: its optimizer, how it ended and how to go on; errors on standard error."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from run_files import differing, read_metrics, snapshot

from gptlite.checkpoint.find import candidates
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.start.pretrain import pretrain
from gptlite.trainer import eval as evaluation
from gptlite.trainer import report


@pytest.mark.slow
def test_a_run_ends_early_on_the_schedule_of_the_whole_and_goes_on(run, tmp_path: Path, capsys) -> None:
    common = ("schedule=cosine", "trainer.max_steps=4", "checkpoint.interval=0")
    run("whole", *common)
    capsys.readouterr()
    code, _ = run("parts", *common, "trainer.stop_step=2")
    said = capsys.readouterr().out
    assert code == 0
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["status"] == "stopped: trainer.stop_step"
    assert "step 2 of 4" in said
    assert f"run.dir={tmp_path / 'parts'} trainer.stop_step=null" in said
    with pytest.raises(ConfigError, match=r"trainer\.stop_step=1 is below step 2 of .*; give 2 or more"):
        run("parts", *common, "trainer.stop_step=1")
    run("parts", *common, "trainer.stop_step=2")  # no step is trained
    assert "nvidia-ml-py" not in capsys.readouterr().out
    run("parts", *common, "trainer.stop_step=null")
    assert differing(tmp_path / "whole", tmp_path / "parts", 4) == []


@pytest.mark.parametrize(("quiet", "steps"), [(0.0, [1, 2, 3, 4, 5]), (1e9, [1, 5])])
def test_slow_steps_have_a_line_each_and_no_row(
    run, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, quiet: float, steps: list[int]
) -> None:
    monkeypatch.setattr(report, "QUIET_SECONDS", quiet)
    run("a", "trainer.max_steps=5", "trainer.log_interval=1000", "trainer.eval_interval=0")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1].split("/")[0]) for line in lines] == steps
    assert all(re.search(r"loss +\d.*norm +\d.*[0-9.k]+ tok/s.*ETA \d", line) for line in lines)
    assert [row["step"] for row in read_metrics(tmp_path / "a") if "loss" in row] == [1, 5]


def test_a_finished_run_is_left_as_it_is(run, begun: Path, capsys) -> None:
    before = {name: digest for name, digest in snapshot(begun).items() if name != "train.log"}
    capsys.readouterr()
    code, _ = run("a", "trainer.max_steps=2")
    said = capsys.readouterr().out
    assert code == 0
    assert said.splitlines()[-1] == "already complete: step 2 of 2; to train further give trainer.max_steps=4"
    assert {name: digest for name, digest in snapshot(begun).items() if name != "train.log"} == before


def test_a_run_that_has_reached_its_stop_step_is_left_as_it_is(run, tmp_path: Path, capsys) -> None:
    run("a", "trainer.stop_step=2", "trainer.max_steps=4")
    before = {name: digest for name, digest in snapshot(tmp_path / "a").items() if name != "train.log"}
    assert json.loads((tmp_path / "a" / "result.json").read_text())["loss"] > 0
    capsys.readouterr()
    code, _ = run("a", "trainer.stop_step=2", "trainer.max_steps=4")
    said = capsys.readouterr().out.splitlines()[-1]
    assert (code, said) == (
        0,
        "already at trainer.stop_step=2: step 2 of 4; to train further give trainer.stop_step=null",
    )
    assert {name: digest for name, digest in snapshot(tmp_path / "a").items() if name != "train.log"} == before


def test_the_hint_says_that_the_rate_rises_again(run, begun: Path, capsys) -> None:
    run("b", "schedule=wsd", "trainer.max_steps=4")
    told = capsys.readouterr().out
    assert "trainer.max_steps=8\n           (this stretches the schedule: the learning rate rises from " in told
    constant = (begun / "train.log").read_text()
    assert "trainer.max_steps=4" in constant
    assert "stretches" not in constant


def test_the_banner_names_the_optimizer_and_its_schedule_and_no_kernel_of_another(banner: Callable[..., str]) -> None:
    said = banner("a", "optimizer=lion", "optimizer.lr=0.0002", "schedule=wsd")
    assert "optimizer lion: peak rate 0.0002, weight decay 1, clipped at a gradient norm of 1; schedule wsd" in said
    assert "adamw" not in said
    said = banner("b", "optimizer.clip_norm=0")
    assert "optimizer adamw: peak rate" in said
    assert "not clipped" in said
    assert "adamw" in said[said.index(" ops ") : said.index(" optimizer ")]
    for name, steps_by_kernel in (("adam", True), ("muon", True), ("sgd", False)):
        said = banner(name, f"optimizer={name}")
        assert ("adamw" in said[said.index(" ops ") : said.index(" optimizer ")]) is steps_by_kernel, name


def test_weights_of_another_machine_are_no_resumed_run(run, begun: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("gptlite.trainer.folder.environment_changes", lambda *_: ["threads 1 (was 2)"])
    start = f"checkpoint.resume={begun}"
    capsys.readouterr()
    run("weights", start, "checkpoint.load=weights", "trainer.max_steps=2")
    assert "resuming with a change" not in capsys.readouterr().out
    run("whole", start, "trainer.max_steps=3")
    assert "resuming with a change: threads 1 (was 2)" in capsys.readouterr().out


def test_an_evaluation_that_takes_long_says_how_far_it_is(run, capsys, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "PROGRESS_SECONDS", 0.0)
    run("a", "trainer.max_steps=2", "data.micro_batch_size=1")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluating: ")]
    assert [line.split(" batches, ETA ")[0] for line in said] == [f"evaluating: {n} of 8" for n in range(1, 8)]


def test_spikes_are_in_the_summary_and_the_result(run, tmp_path: Path, capsys, monkeypatch) -> None:
    from gptlite.trainer.spike import Spike, SpikeWatch

    spikes = [Spike(4, 8, 16, "for the test")]
    taken = SpikeWatch.taken
    monkeypatch.setattr(
        SpikeWatch, "taken", lambda watch, n, *rest: spikes.pop() if n == 4 and spikes else taken(watch, n, *rest)
    )
    code, _ = run("a", "trainer.spike.policy=skip", "checkpoint.interval=1", "checkpoint.keep=9", "trainer.max_steps=6")
    assert code == 0
    assert "loss spikes 1, at step 4; 8 samples skipped" in " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["spikes"] == [{"step": 4, "skipped_from": 8, "skipped_to": 16}]
    assert [row["spike_step"] for row in read_metrics(tmp_path / "a") if "spike_step" in row] == [4]


def test_paths_where_presets_or_checkpoints_belong_are_answered_with_the_right_key(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=r"is a path, but data= takes a preset; give data=text data\.path=.*mine"):
        load([f"data={tmp_path / 'mine'}"])
    (tmp_path / "mine" / "train.idx").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"give data=tokens data\.path=.*mine"):
        load([f"data={tmp_path / 'mine'}"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a Hugging Face model; convert it first: .* import "):
        candidates(str(tmp_path), "checkpoint.resume")


def test_the_banner_has_the_memory_that_it_is_given(tiny: list[str], tmp_path: Path) -> None:
    pretrain(
        load([*tiny, f"run.dir={tmp_path / 'a'}", "run.name=a", "trainer.stop_step=1"]), memory="12 MiB, says a plan"
    )
    assert re.search(r"^  memory +12 MiB, says a plan$", (tmp_path / "a" / "train.log").read_text(), re.MULTILINE)
