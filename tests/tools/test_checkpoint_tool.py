"""`gptlite checkpoint`, as a user calls it, on copies of the version-1 fixture: nothing is trained."""

import errno
import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint.destruction import hostile
from checkpoint.destruction.wounds import flip
from run_files import snapshot

from gptlite.checkpoint import store
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.config import load
from gptlite.config.saved import to_yaml
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.satellites.checkpoint_tool import command, huggingface
from gptlite.trainer.state import model_tensors

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "checkpoint" / "fixtures" / "v1" / "step-00000003"


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """The checkpoints folder of a run with steps 1 to 4."""
    root = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3, 4):
        shutil.copytree(FIXTURE, root / f"step-0000000{step}")
        hostile.edit_manifest(root / f"step-0000000{step}", lambda each, step=step: each["meta"].update(step=step))
    (root / "latest").write_text("step-00000004\n")
    (root / ".lock").touch()
    return root


def cut(folder: Path) -> None:
    path = folder / "data" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def flip_in(folder: Path) -> None:
    flip(folder / "data" / "__0_0.distcp", 2000)


def edit_config(folder: Path, old: str, new: str) -> Path:
    """The configuration of a copy with one line changed, as a file of its own."""
    text = (folder / "config.yaml").read_text()
    assert old in text
    path = folder.parent.parent / "edited.yaml"
    path.write_text(text.replace(old, new))
    return path


def test_ls_shows_what_resuming_would_take_and_what_is_left_over(tool, steps):
    cut(steps / "step-00000004")
    flip_in(steps / "step-00000003")
    for left in (".tmp-step-00000005-x", ".trash-step-00000000-x", "damaged-step-00000002-x"):
        (steps / left).mkdir()
    code, out, _ = tool("ls", steps.parent)
    lines = out.splitlines()
    assert code == 1
    assert lines[1].split() == ["step", "tokens", "written", "age", "size", "best", "val", "layout", "status"]
    assert [line.split()[0] for line in lines[2:6]] == ["4", "3", "2", "1"]
    assert "DAMAGED: data/__1_0.distcp has 29409 bytes, but its manifest lists 29410" in lines[2]
    assert lines[3].endswith("intact  <- resumes here")
    assert "2.5677    tensor 2" in lines[3]
    assert [line.split()[0] for line in lines[6:]] == [
        ".tmp-step-00000005-x",
        ".trash-step-00000000-x",
        "damaged-step-00000002-x",
    ]
    assert "left by a process that died" in lines[6]
    hashed = tool("ls", steps.parent, "hashes=true").out.splitlines()
    assert "DAMAGED: data/__0_0.distcp has damaged bytes" in hashed[3]
    assert hashed[4].endswith("intact to the byte  <- resumes here")


def test_ls_finds_the_runs_below_a_folder_and_a_writer_at_work(tool, steps, tmp_path):
    shutil.copytree(steps, tmp_path / "sweep" / "lr=0.1" / "checkpoints")
    (steps / ".tmp-step-00000005-x").mkdir()
    with open(steps / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        code, out, _ = tool("ls", tmp_path)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("/")] == [
        str(steps),
        str(tmp_path / "sweep" / "lr=0.1" / "checkpoints"),
    ]
    assert "being written" in out


def test_inspect_says_what_is_in_it(tool, steps):
    code, out, _ = tool("inspect", steps.parent)
    assert code == 0
    for part in (
        "step-00000004\n",
        "step 4, 48 tokens, 6 samples",
        "best 2.5677",
        "layout      tensor 2",
        "gptlite 0.1.0, torch 2.13.0+cpu",
        "sgd, lr 0.003, constant, seed 1",
        "model 1.12 KiB in 9 tensors (288 parameters); optimizer 1.12 KiB in 9 tensors",
        "53.3 KiB in 5 files",
        "data/__1_0.distcp",
    ):
        assert part in out, part
    assert out.count("float32") == 5
    listed = tool("inspect", steps / "step-00000002", "tensors=true").out
    assert listed.count("float32") == 18
    assert "model.token_embedding.weight                     [13, 4]  float32  0.000" in listed


def test_inspect_spells_what_is_nested_or_left_open(tool, steps):
    folder = steps / "step-00000004"
    identity = {"tokenizer": None, "folders": {"web": {"train": "0123456789abcdef" * 4}}}
    hostile.edit_manifest(folder, lambda manifest: manifest["meta"].update(data_identity=identity))
    config = (folder / "config.yaml").read_text()
    assert "micro_batch_size: 1" in config
    hostile.replace(folder, "config.yaml", config.replace("micro_batch_size: 1", "micro_batch_size: null").encode())
    out = tool("inspect", folder).out
    assert "data        tokenizer none, folders.web.train 01234567\n" in out
    assert "2 sequences of 8, micro-batch as large as fits, fp32" in out


def test_inspect_shows_the_boxes_and_files_of_a_tensor(tool, steps):
    code, out, _ = tool("inspect", steps, "tensor=model.token_embedding.weight")
    assert code == 0
    assert "float32 [13, 4], 208 B" in out
    row = json.loads(tool("inspect", steps, "tensor=model.token_embedding.weight", "json=true").out)
    assert (row["elements"], row["nan"]) == (52, 0)
    assert [box["offset"] for box in row["boxes"]] == [[0, 0], [7, 0]]
    assert [box["file"] for box in row["boxes"]] == ["data/__0_0.distcp", "data/__1_0.distcp"]


def test_inspect_is_json_for_scripts_and_says_damage(tool, steps):
    row = json.loads(tool("inspect", steps, "json=true", "tensors=true").out)
    assert row["meta"]["step"] == 4
    assert row["damage"] is None
    assert row["config"]["optimizer"]["momentum"] == 0.9
    assert row["kinds"]["model"] == {"tensors": 9, "elements": 288, "bytes": 1152}
    assert len(row["tensors"]) == 18
    cut(steps / "step-00000004")
    passed_over = tool("inspect", steps)
    assert (passed_over.code, "skipped" in passed_over.err) == (0, True)
    code, out, _ = tool("inspect", steps / "step-00000004")
    assert (code, "DAMAGED: data/__1_0.distcp has" in out) == (1, True)


def test_verify_names_each_damage(tool, steps):
    code, out, _ = tool("verify", steps.parent)
    assert (code, out.count("ok  "), "; all 18 tensors complete" in out) == (0, 4, True)
    flip_in(steps / "step-00000002")
    cut(steps / "step-00000003")
    (steps / "step-00000001" / "MANIFEST.json").unlink()
    code, out, _ = tool("verify", steps)
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("ok ")
    assert "its manifest lists 29410" in lines[1]
    assert "data/__0_0.distcp has damaged bytes" in lines[2]
    assert "MANIFEST.json is missing" in lines[3]
    assert lines[4] == "1 of 4 intact"
    assert tool("verify", steps / "step-00000002", "hashes=false").code == 0


def test_verify_and_export_name_weights_that_are_not_finite(tool, tmp_path):
    sizes = ("model=gpt-lite", "model.num_layers=1", "model.num_heads=1", "model.d_model=8", "model.sequence_length=8")
    config = load(["data=synthetic", "data.vocab_size=9", "data.sequence_length=8", "model.vocab_size=9", *sizes])
    tensors = model_tensors(Model.of(config.model), [GPT(config.model)])
    tensors["model.final_norm.weight"].detach()[5] = torch.nan
    step = Checkpointer(CheckpointConfig(), tmp_path / "run").save(tensors, {"step": 1}, to_yaml(config), None, print)
    problem = "model.final_norm.weight has 1 NaN or infinite element, the first at [5]"
    code, out, _ = tool("verify", step)
    assert (code, problem in out) == (1, True), out
    code, _, errors = tool("export", step, tmp_path / "out")
    assert (code, problem in errors, (tmp_path / "out").exists()) == (2, True, False)


def test_diff_of_the_same_is_nothing(tool, steps):
    for arguments in (
        [steps, steps],
        [steps / "step-00000003", FIXTURE, "values=true"],
        [steps, FIXTURE / "config.yaml"],
    ):
        code, out, _ = tool("diff", *arguments)
        assert (code, out.splitlines()[2:]) == (0, ["no difference"])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("num_layers: 1", "num_layers: 2", "refused model.num_layers 1 2"),
        ("momentum: 0.9", "momentum: 0.8", "changes the numbers optimizer.momentum 0.9 0.8"),
        ("tensor: 2", "tensor: 1", "reshards parallelism.tensor 2 1"),
        ("log_interval: 1", "log_interval: 5", "safe trainer.log_interval 1 5"),
    ],
)
def test_diff_of_configurations_has_resumings_classes(tool, steps, old, new, words):
    code, out, _ = tool("diff", steps, edit_config(steps / "step-00000004", old, new))
    assert code == 1
    assert [" ".join(line.split()) for line in out.splitlines()[2:]] == ["configuration", "class key a b", words]


def test_diff_reads_a_configuration_of_another_version(tool, steps):
    later = edit_config(steps / "step-00000004", "momentum: 0.9", "momentum: 0.9\n  novelty: 7")
    code, out, _ = tool("diff", FIXTURE, later)
    assert (code, "optimizer.novelty" in out) == (1, True)


def test_diff_of_checkpoints_names_tensors_and_with_values_how_far(tool, tmp_path):
    nan = torch.tensor([torch.nan, 1.0])
    a = {"model.x": torch.arange(6.0), "model.y": torch.ones(3), "model.z": nan}
    b = {"model.x": a["model.x"] + 0.5, "model.y": torch.ones(4), "model.z": nan, "model.only": torch.ones(1)}
    config = (FIXTURE / "config.yaml").read_text()
    folders = [
        Checkpointer(CheckpointConfig(), tmp_path / name).save(tensors, {"step": 5}, config, None, print)
        for name, tensors in (("a", a), ("b", b))
    ]
    code, out, _ = tool("diff", *folders)
    assert code == 1
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "model.y float32 [3] float32 [4]" in lines
    assert "model.only absent float32 [1]" in lines
    assert "values: the tensor files differ" in out
    lines = [" ".join(line.split()) for line in tool("diff", *folders, "values=true").out.splitlines()]
    assert "values: 1 of 2 tensors differ" in lines
    assert "model.x 6 0.5 0.165" in lines  # sqrt(6 * 0.25 / 55)


def test_runs_are_looked_for_as_deep_as_a_sweep_writes_them(tool, steps, tmp_path):
    deep = tmp_path / "outputs" / "sweep" / "date" / "time" / "job"
    deep.parent.mkdir(parents=True)
    steps.parent.rename(deep)
    assert tool("ls", tmp_path / "outputs" / "sweep").out.startswith(f"{deep}/checkpoints\n")
    assert "outputs holds no checkpoint" in tool("ls", tmp_path / "outputs").err


def test_prune_says_first_and_then_does(tool, steps):
    before = snapshot(steps)
    (steps / ".tmp-step-00000009-x").mkdir()
    code, out, _ = tool("prune", steps.parent, "keep=1", "every=2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:5]] == ["keep", "keep", "remove", "remove", "remove"]
    assert out.splitlines()[-1] == "nothing is removed yet; give yes=true to remove"
    assert snapshot(steps) == before
    assert tool("prune", steps.parent, "keep=1", "every=2", "yes=true").code == 0
    assert sorted(path.name for path in steps.iterdir()) == [".lock", "latest", "step-00000002", "step-00000004"]


def test_prune_never_removes_the_newest_that_reads_back(tool, steps):
    flip_in(steps / "step-00000004")
    cut(steps / "step-00000003")
    aside = steps / "damaged-step-00000002-x"
    aside.mkdir()
    code, out, _ = tool("prune", steps, "keep=1", "yes=true")
    assert code == 0
    assert aside.exists()
    assert sorted(path.name for path in steps.glob("step-*")) == ["step-00000002", "step-00000003", "step-00000004"]
    assert "(every byte is verified)" in out
    assert tool("prune", steps, "keep=1", "damaged=true", "yes=true").code == 0
    assert [path.name for path in steps.glob("*step-*")] == ["step-00000002"]
    assert (steps / "latest").read_text() == "step-00000002\n"


def test_prune_removes_nothing_if_nothing_is_intact(tool, steps):
    for folder in steps.glob("step-*"):
        flip_in(folder)
    before = snapshot(steps)
    code, _, err = tool("prune", steps, "keep=1", "damaged=true", "yes=true")
    assert (code, snapshot(steps)) == (2, before)
    assert "4 checkpoints found, but none is intact" in err


def test_prune_leaves_a_living_writers_folder(tool, steps):
    (steps / ".tmp-step-00000009-x").mkdir()
    with open(steps / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        code, out, _ = tool("prune", steps, "keep=1", "yes=true")
    assert (code, "a process may still be using it" in out) == (0, True)
    assert (steps / ".tmp-step-00000009-x").exists()
    assert [path.name for path in steps.glob("step-*")] == ["step-00000004"]


def test_export_and_import_hand_on_what_was_given(tool, steps, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(huggingface, "export", lambda *paths, **options: calls.append((paths, options)))
    monkeypatch.setattr(huggingface, "import_", lambda *paths, **options: calls.append((paths, options)))
    assert tool("export", steps.parent, tmp_path / "hf", "dtype=bf16", "max_shard_bytes=1000").code == 0
    assert tool("import", FIXTURE, tmp_path / "new").code == 0
    (exported, options), (imported, _) = calls
    assert exported == (steps.parent, tmp_path / "hf")
    assert (options["dtype"], options["max_shard_bytes"]) == ("bf16", 1000)
    assert imported == (FIXTURE, tmp_path / "new")


REFUSED = {
    "lss .": "lss is not one of ls, inspect, verify, diff, prune, export, import, upcycle; did you mean ls?",
    "ls": "ls takes PATH ...; 0 paths given; see --help",
    "ls {run}x": "did you mean run?",
    "ls {tmp}/empty": "empty holds no checkpoint",
    "ls {run} hash=true": "hash is not a key of this tool; did you mean hashes?",
    "ls {run} hashes=ture": "hashes=ture",
    "ls {run} --hashes": "--hashes: options are key=value",
    "inspect {run} tensor=model.token_embeding.weight": "did you mean model.token_embedding.weight?",
    "inspect {tmp}": "is a folder of several runs; give one of them",
    "verify {run}/checkpoints/step-00000099": "does not exist",
    "diff {run}": "diff takes A B; 1 path given",
    "diff {run} {run}/checkpoints/latest": "is not a run's config.yaml",
    "diff {run} {run}/checkpoints/step-00000001/config.yaml values=true": "is a configuration and holds no tensors",
    "prune {run}": "keep is not set; give keep=K",
    "prune {run} keep=0": "keep=0",
    "prune {run}/checkpoints/step-00000001 keep=1": "is one checkpoint; give its run",
    "import {run} {tmp}/new dtype=bf16": "dtype is not a key of this tool; the keys are plugins",
    "export {run} {tmp}/new dtype=fp12": "dtype=fp12",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_wrong_call_is_refused_in_one_line(tool, steps, tmp_path, arguments):
    (tmp_path / "empty").mkdir()
    shutil.copytree(steps, tmp_path / "other" / "checkpoints")
    result = tool(*arguments.format(run=steps.parent, tmp=tmp_path).split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert REFUSED[arguments] in result.err
    assert result.err.count("\n") == 1


def test_prune_names_what_it_cannot_remove_and_removes_the_rest(tool, steps, monkeypatch):
    remove = store.remove

    def fails_once(folder: Path) -> None:
        if folder.name == "step-00000002":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        remove(folder)

    monkeypatch.setattr("gptlite.checkpoint.store.remove", fails_once)
    code, out, err = tool("prune", steps, "keep=1", "yes=true")
    kept = steps / "step-00000002"
    assert (code, err) == (1, f"error: {kept}: Permission denied; change the permissions, or give another path\n")
    assert out.endswith("removed 2 of 3\n")
    assert {each.name for each in steps.glob("step-*")} == {"step-00000002", "step-00000004"}


@pytest.mark.parametrize("name", ["", *command.SUBCOMMANDS])
def test_help_says_what_a_subcommand_takes(tool, name):
    code, out, _ = tool(*name.split(), "--help")
    assert code == 0
    if name:
        assert f": {name} {command.SUBCOMMANDS[name].usage}" in out.splitlines()[0]
    else:
        assert all(f"  {each} {sub.usage}" in out for each, sub in command.SUBCOMMANDS.items())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["diff", "--help"], ["ls", str(FIXTURE.parent)], ["inspect", str(FIXTURE)]]
)
def test_looking_does_not_load_torch(arguments):
    """Which takes seconds: listing checkpoints is a matter of reading a few small files."""
    code = f"import sys; sys.argv[1:] = {['checkpoint', *arguments]}\n"
    code += "import gptlite.__main__\ntry: gptlite.__main__.main()\n"
    code += "finally: print('torch' in sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (result.returncode, result.stderr) == (0, "False\n")
