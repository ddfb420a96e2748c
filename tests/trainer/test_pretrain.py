"""Whole runs of a tiny model: what they leave behind, resuming, stopping, refusing."""

import json
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import forked
import pytest
import torch
from marking import marked
from run_files import checkpoint, differing, meta, read_metrics, snapshot
from torch import Tensor

from gptlite.config import load
from gptlite.config.saved import from_yaml, read_saved
from gptlite.config.schema import CONF_DIR
from gptlite.errors import ConfigError
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.parity.record import build
from gptlite.tokenizers.base import ByteTokenizer
from gptlite.trainer.folder import RunFolder

TRAIN = str(CONF_DIR.parent / "train.py")
CONTRACT = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "samples_per_second", "step_seconds", "mfu",
    "memory_allocated_bytes", "memory_peak_bytes", "memory_average_bytes", "utilization",
}  # fmt: skip


def curve(folder: Path, *keys: str) -> list[tuple]:
    """The step and further columns of the training rows."""
    return [tuple(row[key] for key in ("step", *keys)) for row in read_metrics(folder) if "loss" in row]


def test_the_closing_report_does_not_depend_on_the_sample(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "prompt", lambda self, text: {}[text])
    assert run("a", "trainer.max_steps=2")[0] == 0
    log = (tmp_path / "a" / "train.log").read_text()
    assert "warning: no sample: KeyError" in log
    assert "== results ==" in log
    assert f"run.dir={tmp_path / 'a'}" in log[log.index("\nresume:") :]


def test_a_run_leaves_what_the_contract_says(run, tmp_path: Path) -> None:
    code, config = run("a", "trainer.eval_interval=4", "checkpoint.interval=3")
    assert code == 0
    folder = tmp_path / "a"
    for name in ("config.yaml", "metrics.jsonl", "train.log", "result.json"):
        assert (folder / name).stat().st_size > 0
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000006", "step-00000008"]
    rows = read_metrics(folder)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert all(set(row) >= CONTRACT for row in steps)
    assert [row["tokens"] for row in steps] == [4 * 32 * step for step in range(1, 9)]
    evaluations = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [4, 8]
    assert all(row["val_bits_per_byte"] > 0 for row in evaluations)
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "done"
    assert result["best_val_loss"] == min(row["val_loss"] for row in evaluations)
    saved = from_yaml((folder / "config.yaml").read_text())
    assert saved.model.vocab_size == 257
    assert saved.trainer == config.trainer


RESUMED = ("precision=fp32", "precision=bf16", "precision=bf16_stochastic", "optimizer=adamw_8bit model.d_model=64")


@pytest.mark.parametrize("options", marked(RESUMED, quick=2, slow=2))
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(run, tmp_path: Path, options: str) -> None:
    steps = ("checkpoint.interval=2", "trainer.max_steps=4")
    common = (*options.split(), "model.num_layers=2", "model.dropout=0.1", *steps)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("whole", *common)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000004")
    run("parts", *common)
    assert "resuming from" in (parts / "train.log").read_text()
    assert curve(whole, "loss", "grad_norm") == curve(parts, "loss", "grad_norm")
    assert differing(whole, parts, 4) == []


@pytest.fixture
def losses(tiny: list[str]) -> Callable[..., Tensor]:
    """The losses of the tiny run's first steps, with further overrides."""

    def take(*overrides: str) -> Tensor:
        state, step = build(load([*tiny, "run.dir=unused", "run.name=x", *overrides]), Mesh(torch.device("cpu")))
        with closing(state.loader):
            return torch.tensor([step(state).loss for _ in range(4)])

    return take


def test_the_numbers_do_not_depend_on_how_the_batch_is_cut(losses: Callable[..., Tensor]) -> None:
    one, two, four = (losses(f"data.micro_batch_size={size}", "model.dropout=0.1") for size in (1, 2, 4))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=0)
    torch.testing.assert_close(four, one, rtol=1e-5, atol=0)


def test_activation_checkpointing_changes_no_number(losses: Callable[..., Tensor]) -> None:
    none, full, selective = (
        losses("model.dropout=0.1", f"parallelism.activation_checkpointing={mode}")
        for mode in ("none", "full", "selective")
    )
    assert torch.equal(full, none)
    assert torch.equal(selective, none)


def test_weights_alone_start_a_new_run(run, begun: Path, tmp_path: Path) -> None:
    code, _ = run("second", f"checkpoint.resume={begun}", "checkpoint.load=weights", "trainer.max_steps=2")
    assert code == 0
    rows = [row for row in read_metrics(tmp_path / "second") if "loss" in row]
    first = [row for row in read_metrics(begun) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["lr"] == first[0]["lr"]
    assert rows[0]["loss"] < first[0]["loss"] - 0.1


def test_a_diverging_run_stops_and_keeps_its_checkpoints(run, tmp_path: Path, capsys) -> None:
    code, _ = run("a", "optimizer.lr=1e30", "optimizer.clip_norm=0", "checkpoint.interval=1", "checkpoint.keep=0")
    assert code == 1
    assert "Try a lower optimizer.lr" in capsys.readouterr().err
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["status"].startswith("diverged: step ")
    assert all(tensor.isfinite().all() for tensor in checkpoint(tmp_path / "a", result["step"])[0].values())


def test_max_time_saves_and_ends(run, tmp_path: Path) -> None:
    code, _ = run("a", "trainer.max_time=0.001", "trainer.max_steps=100000", "trainer.log_interval=1000")
    assert code == 0
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["status"] == "stopped: trainer.max_time"
    assert (tmp_path / "a" / "checkpoints" / f"step-{result['step']:08d}").is_dir()


def test_the_profiler_writes_a_chrome_trace_cut_short_by_the_end_or_a_failure(run, tmp_path: Path) -> None:
    for steps, name in (("[2,3]", "trace-steps-2-3"), ("[3,9]", "trace-steps-3-4")):
        run(name, f"trainer.profile_steps={steps}", "trainer.max_steps=4")
        trace = json.loads((tmp_path / name / f"{name}.json").read_text())
        assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])
    code, _ = run("b", "trainer.profile_steps=[1,9]", "optimizer.lr=1e30", "optimizer.clip_norm=0")
    assert code == 1
    assert list((tmp_path / "b").glob("trace*")) == []


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.num_layers=3", "model.num_layers=3"),
        pytest.param("seed=5", "seed=5", marks=pytest.mark.slow),
        pytest.param("data.tokenizer=char", "data.tokenizer=char", marks=pytest.mark.slow),
        ("optimizer=sgd", "optimizer=sgd (was adamw)"),
        ("", "the data's train="),  # of another text
    ],
)
def test_another_run_is_refused_in_the_same_folder(run, text: Path, begun: Path, override: str, named: str) -> None:
    before = snapshot(begun)
    if not override:
        text.write_text(text.read_text() + "one more line\n")
    with pytest.raises(ConfigError) as refusal:
        run("a", *override.split())
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert snapshot(begun) == before


def test_a_refused_resume_announces_no_resume(run, begun: Path, capsys) -> None:
    capsys.readouterr()
    with pytest.raises(ConfigError, match=r"trainer.max_steps=1 is below step 2"):
        run("a", "trainer.max_steps=1", "schedule.warmup_steps=0", "optimizer.lr=2e-3")
    assert "resuming" not in capsys.readouterr().out


def test_a_folder_inside_a_run_is_refused(run, begun: Path) -> None:
    before = snapshot(begun)
    with pytest.raises(ConfigError, match=f"is inside another run; give run.dir={begun} to resume it"):
        run("a/checkpoints/step-00000002")
    assert snapshot(begun) == before
    with pytest.raises(ConfigError, match=f"is a folder of runs; .* e.g. run.dir={begun}, or a new folder"):
        run("x", f"run.dir={begun.parent}")


def test_another_sequence_length_begins_an_era(run, begun: Path) -> None:
    config = read_saved(begun / "config.yaml")
    assert config.data.sequence_length != 16
    code, _ = run("a", "trainer.max_steps=4", "data.sequence_length=16")
    assert code == 0
    samples = 2 * config.data.global_batch_size
    assert f"data order: from sample {samples:,} on, sequences of 16: " in (begun / "train.log").read_text()
    eras = meta(begun, 4)["data_order"]
    first = 0, config.data.sequence_length
    assert [(era["start"], era["sequence_length"]) for era in eras] == [first, (samples, 16)]


def test_length_and_logging_may_change(run, begun: Path, capsys) -> None:
    code, _ = run("a", "trainer.max_steps=5", "trainer.log_interval=2", "checkpoint.keep=1", "optimizer.lr=1e-4")
    assert code == 0
    assert "optimizer.lr=0.0001 (was 0.003)" in capsys.readouterr().out
    assert from_yaml((begun / "config.1.yaml").read_text()).trainer.max_steps == 2
    assert [row["step"] for row in read_metrics(begun) if "loss" in row] == [1, 2, 4, 5]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts train.py in the folder above its run's; ended with the test, whatever happens."""
    started: list[subprocess.Popen] = []

    def process(tiny: list[str], folder: Path, *overrides: str) -> subprocess.Popen:
        command = [sys.executable, TRAIN, *tiny, f"run.dir={folder}", *overrides]
        out = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, cwd=folder.parent))
        return started[-1]

    yield process
    for each in started:
        each.kill()
        each.wait()
        if each.stdout:
            each.stdout.close()


@pytest.mark.parametrize("number", marked([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], slow=3))
def test_a_signal_saves_and_exits_with_its_code(tiny: list[str], run, tmp_path: Path, number: int, start) -> None:
    folder = tmp_path / "a"
    process = start(tiny, folder, "trainer.max_steps=1000000", "trainer.log_interval=5")
    wait_for(folder / "metrics.jsonl", process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "stopped: signal"
    step = result["step"]
    assert (folder / "checkpoints" / f"step-{step:08d}" / "MANIFEST.json").exists()
    assert f"{shlex.quote(str(TRAIN))} run.dir={folder}" in output  # from outside the checkout


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.stat().st_size:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_wrong_key_exits_2_with_one_line_and_writes_nothing(tiny: list[str], tmp_path: Path, start) -> None:
    before = snapshot(tmp_path)
    process = start(tiny, tmp_path / "a", "trainer.max_stepz=3")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.startswith("error: ")
    assert "did you mean trainer.max_steps?" in output
    assert output.count("\n") == 1
    assert snapshot(tmp_path) == before


def test_a_refusal_after_the_composition_exits_2_with_one_line(tiny: list[str], tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    ended = forked.run(
        "-m", "gptlite", "train", *tiny, f"run.dir={tmp_path / 'a'}", "data.path=nowhere.txt", folder=tmp_path
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert "data.path=nowhere.txt" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert snapshot(tmp_path) == before


REFUSED = (
    *("data.path=nowhere.txt", "data.sequence_length=64", "checkpoint.resume=nowhere", "ops.attention=cudnn"),
    *("run.dir=/proc/run", "run.dir=text.txt/run"),
)


@pytest.mark.parametrize("override", REFUSED)
def test_a_refusal_is_one_line_and_writes_nothing(run, tmp_path: Path, monkeypatch, override: str) -> None:
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        run("a", override)
    assert override in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_run_started_from_weights_goes_on_given_its_folder_alone(tiny: list[str], tmp_path: Path, start) -> None:
    first, second = tmp_path / "a", tmp_path / "b, with a comma"
    assert start(tiny, first, "trainer.max_steps=2").wait(60) == 0
    quoted = f"run.dir='{second}'"
    process = start(tiny, first, quoted, "trainer.max_steps=2", f"checkpoint.resume={first}", "checkpoint.load=weights")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    process = start([], first, quoted, "trainer.max_steps=4")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert curve(second) == [(1,), (2,), (3,), (4,)]


@pytest.mark.slow
def test_ctrl_c_on_a_pipe_whose_reader_dies_with_it_still_saves(tiny: list[str], tmp_path: Path, start) -> None:
    """`python train.py | tee log`: the terminal sends SIGINT to both, and tee goes at once."""
    folder = tmp_path / "a"
    process = start(tiny, folder, "trainer.max_steps=1000000")
    wait_for(folder / "metrics.jsonl", process)
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    result = json.loads((folder / "result.json").read_text())
    assert (folder / "checkpoints" / f"step-{result['step']:08d}").is_dir()


@pytest.mark.slow
def test_two_processes_do_not_train_in_one_folder(tiny: list[str], tmp_path: Path, start) -> None:
    folder = tmp_path / "a"
    process = start(tiny, folder, "trainer.max_steps=1000000", "trainer.log_interval=100")
    wait_for(folder / "metrics.jsonl", process)
    second = start(tiny, folder, "trainer.max_steps=1000000", "trainer.log_interval=100")
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"run.dir={folder}: process {process.pid} on {platform.node()} is training in it; wait, stop it" in output
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_a_put_off_evaluation_is_made_up_for(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped where an evaluation was due, the resumed run has the evaluations of the uninterrupted one."""
    common = ("trainer.eval_interval=2", "checkpoint.interval=0", "trainer.max_steps=6")
    run("whole", *common)
    from gptlite.trainer import trainer

    evaluate_sets = trainer.evaluate_sets
    monkeypatch.setattr(trainer, "evaluate_sets", lambda *arguments: None)
    run("parts", *common, "trainer.max_steps=4")
    monkeypatch.setattr(trainer, "evaluate_sets", evaluate_sets)
    run("parts", *common)
    rows = [
        {row["step"]: row["val_loss"] for row in read_metrics(tmp_path / name) if "val_loss" in row}
        for name in ("whole", "parts")
    ]
    assert list(rows[0]) == [2, 4, 6]
    assert list(rows[1]) == [4, 6]
    assert rows[1].items() <= rows[0].items()


def test_old_configurations_are_kept(tiny: list[str], begun: Path) -> None:
    words = [*tiny, f"run.dir={begun}", "run.name=a"]
    folder = RunFolder(load(words), Mesh(torch.device("cpu")))

    def write(steps: int) -> None:
        folder.config = load([*words, f"trainer.max_steps={steps}"])
        folder.write_config()

    for steps in (3, 4):
        write(steps)
    kept = [from_yaml((begun / name).read_text()).trainer.max_steps for name in ("config.1.yaml", "config.2.yaml")]
    assert kept == [2, 3]
    (begun / "config.1.yaml").unlink()
    write(5)
    assert from_yaml((begun / "config.2.yaml").read_text()).trainer.max_steps == 3


def test_what_fails_is_in_the_log_and_the_result(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptlite.trainer import trainer

    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(trainer.Step, "begin", fail)
    with pytest.raises(RuntimeError):
        run("a")
    assert json.loads((tmp_path / "a" / "result.json").read_text())["status"].endswith("the disk is on fire")
    assert "Traceback" in (tmp_path / "a" / "train.log").read_text()


@pytest.mark.slow
def test_what_follows_from_a_rank_that_ended_all_is_put_down_to_it(run, tmp_path: Path, monkeypatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("the connection was closed")

    monkeypatch.setattr("gptlite.trainer.step.Step.begin", fail)
    monkeypatch.setattr("gptlite.trainer.observers.Unwatched.verdict", lambda self: "rank 2 has said nothing for 9 s")
    with pytest.raises(RuntimeError, match="closed"):
        run("a")
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["status"] == "failed: rank 2 has said nothing for 9 s"
