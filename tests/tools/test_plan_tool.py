"""`gptlite plan` and `gptlite tune`, as a user calls them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from token_folders import write_folder
from yaml import safe_load

from gptlite.config import load
from gptlite.invocation import command

SMALL = ("model.num_layers=4", "model.d_model=128", "data=synthetic", "data.vocab_size=300")
SMALL = (*SMALL, "data.global_batch_size=16")
FEW = ("parallelism.tensor=1", "data.micro_batch_size=1")  # layouts, of which a plan is made in a second


def call(tool, *arguments, timeout=120):
    """In a new process."""
    command = [sys.executable, "-m", "gptlite", tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_a_plan_has_its_table_its_command_and_its_files(tmp_path: Path, script: Callable):
    given = ("model=gpt3-xl", "data=synthetic", "cluster=dgx-h100", "data.global_batch_size=64", "parallelism.tensor=1")
    done = script("plan", *given, "top=4", f"out={tmp_path / 'out'}", "tokens=26e9")
    assert done.code == 0, done.err
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert len(plan["layouts"]) == 4
    best = plan["layouts"][0]
    assert best["layout"] in done.out
    line = done.out.strip().split("train the best with\n")[1].splitlines()[0]
    start = command("train")
    assert line.startswith(f"{start} ")
    config = load(line.removeprefix(start).split())
    assert config.data.micro_batch_size == int(best["overrides"][-1].partition("=")[2])
    assert (tmp_path / "out" / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert "26.0B tokens in" in done.out


REFUSED = [
    ("plan", ["cluster=dgx-h10"], "cluster=dgx-h10 does not exist; did you mean dgx-h100?"),
    ("plan", ["cluster=dgx-h100", "cluster.nods=2"], "cluster.nods is not a key; did you mean cluster.nodes?"),
    ("plan", ["cluster=dgx-h100", "cluster.nodes=0"], "cluster.nodes=0 must be at least 1"),
    ("plan", ["cluster=dgx-h100", "top=0"], "top=0 must be above 0"),
    ("plan", ["cluster=dgx-h100", "simulate=maybe"], "simulate=maybe: maybe is not true or false"),
    ("plan", ["calibrat"], "calibrat is neither calibrate nor KEY=VALUE"),
    ("plan", ["calibrate", "model=gpt-lite"], "model=gpt-lite: calibrate takes only seconds and out"),
    ("plan", ["calibrate", "seconds=-1"], "seconds=-1.0 must be above 0"),
    ("plan", ["cluster=dgx-h100", "parallelism.tensor=3", "data=synthetic"], "parallelism.tensor=3"),
    (
        "plan",
        [
            *FEW,
            "parallelism.schedule=1f1b",
            "cluster=dgx-2-v100",
            "cluster.disk_path=null",
            "model=gpt3-175b",
            "data=synthetic",
            "data.global_batch_size=16",
        ],
        "gpt3-175b does not fit cluster=",
    ),
    ("tune", ["k=0"], "k=0 must be above 0"),
    ("tune", ["k=many"], "k=many"),
    ("tune", ["name=a/b"], "name=a/b: a preset's name may have"),
    ("tune", ["optimizer=adamv"], "optimizer=adamv does not exist; did you mean adam?"),
]


@pytest.mark.parametrize(("tool", "arguments", "named"), REFUSED)
def test_wrong_inputs_are_one_line(tool, arguments, named, tmp_path: Path, script: Callable):
    code, _, err = script(tool, *arguments, *([f"out={tmp_path}"] if tool == "tune" else []))
    assert code == 2
    assert named in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("tool", "arguments", "named"), [REFUSED[0], REFUSED[-1]])
def test_a_process_of_its_own_ends_with_2(tool, arguments, named):
    done = call(tool, *arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_preset_is_not_overwritten(tmp_path: Path, script: Callable):
    preset = tmp_path / "parallelism" / "mine.yaml"
    preset.parent.mkdir()
    preset.write_text("# by hand\n")
    code, _, err = script("tune", *SMALL, "name=mine", f"out={tmp_path}")
    assert code == 2
    assert "mine.yaml exists; give another name=, or overwrite=true" in err
    assert preset.read_text() == "# by hand\n"


@pytest.mark.slow
def test_tuning_writes_the_fastest_of_what_ran(tmp_path):
    done = call("tune", *SMALL, "k=2", "steps=4", f"out={tmp_path}", "precision=fp32", timeout=400)
    assert done.returncode == 0, done.stderr
    trials = json.loads((tmp_path / "parallelism" / "tuned.json").read_text())
    assert len(trials) == 2
    best = max(trials, key=lambda trial: trial["tokens_per_second"])
    kept = safe_load((tmp_path / "parallelism" / "tuned.yaml").read_text())
    for override in best["overrides"]:
        key, _, value = override.removeprefix("parallelism.").partition("=")
        if override.startswith("parallelism."):
            assert str(kept[key]).lower() == value
    command = done.stdout.strip().splitlines()[-1]
    assert f"--config-dir {tmp_path} parallelism=tuned" in command


@pytest.mark.slow
def test_a_plan_names_the_vocabulary_and_whether_it_is_assumed(tmp_path: Path, script: Callable):
    given = ("model.num_layers=2", "model.d_model=64", "cluster=dgx-h100", "data.global_batch_size=16", "top=1", *FEW)
    known = script("plan", *given, "data=tokens", f"data.path={write_folder(tmp_path / 'mine')}")
    assert "vocabulary of 257\n" in known.out
    guessed = script("plan", *given, "data=text", f"data.path={tmp_path / 'nowhere.txt'}", f"out={tmp_path / 'out'}")
    assert "vocabulary of 4096 (assumed: data.vocab_size, until the tokenizer" in " ".join(guessed.out.split())
    assert "data.vocab_size" in json.loads((tmp_path / "out" / "plan.json").read_text())["vocabulary_assumed"]
