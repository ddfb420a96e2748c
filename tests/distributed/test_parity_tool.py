"""`gptlite parity` as a user calls it, and what each of its ranks does."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import forked_ranks

from distributed.cells.bugs import planted
from distributed.cells.layouts import BASE
from distributed.cells.run import Ranks
from gptlite.commands.parity import main
from gptlite.config import load
from gptlite.satellites.parity.record import recorded
from gptlite.satellites.parity.worker import compare_run, save_reference

TINY = (
    "model=gpt-lite",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.d_model=32",
    "model.sequence_length=16",
    "model.dropout=0.1",
)


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gptlite", "parity", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable:
    """Calls the command in this process and in a folder: its exit code, standard output and standard error."""

    def called(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["parity", *arguments])
        with forked_ranks(), pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    return called


def test_a_layout_is_compared_with_one_process(tmp_path: Path, command: Callable):
    code, output, errors = command("parallelism=tp2_pp2", "data.micro_batch_size=4", "steps=2", *TINY)
    assert code == 0, output + errors
    lines = output.splitlines()
    assert lines[0] == "one process: 2 steps of gpt-lite"
    assert lines[1] == "pipeline 2 x tensor 2, 1f1b: 4 ranks"
    assert [line.split()[0] for line in lines[2:5]] == ["step", "1", "2"]
    assert lines[5].startswith("same: 2 steps, 28 tensors; loss within ")
    assert len(lines) == 6
    assert list(tmp_path.iterdir()) == []  # nothing is written, least of all into outputs/


@pytest.mark.slow
def test_bf16_and_a_text_of_ones_own(tmp_path: Path, text: Path):
    data = ("data=text", f"data.path={text}", "data.tokenizer=byte", f"data.cache_dir={tmp_path / 'cache'}")
    result = call(tmp_path, "parallelism=zero3", "precision=bf16", "data.micro_batch_size=4", *data, *TINY)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "data 2 (zero 3): 2 ranks" in result.stdout
    assert "same: 5 steps" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["parallelism=tp2", "model.num_heads=3", "model.d_model=48"], "model.num_heads=3 is not divisible by"),
        (["parallelism=tp3"], "parallelism=tp3"),
        ([], "the layout has only one rank"),
        (["parallelism=tp2", "steps=0"], "steps=0"),
        (["parallelism=tp2", "stepps=1"], "stepps"),
        (["parallelism=tp2"], "without torchrun"),
    ],
)
def test_it_refuses_in_one_line(command: Callable, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str):
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in rank.items() if named == "without torchrun" else ():
        monkeypatch.setenv(name, value)
    code, output, errors = command(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("error: ")
    assert named in errors
    assert errors.count("\n") == 1


def test_the_tool_is_the_command(tmp_path: Path):
    result = call(tmp_path, "parallelism=tp2", "steps=0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: steps=0 must be an integer of at least 1\n"


def compared(folder: str, overrides: list[str], bug: str) -> int:
    """On a rank."""
    with planted(bug):
        return compare_run(Path(folder), load(overrides), 0.0, None, None)


@pytest.mark.slow
def test_ranks_say_what_differs(tmp_path: Path):
    run = [*BASE, "precision=fp32", "model.num_layers=2", "data.micro_batch_size=24"]
    torch.set_num_threads(1)
    save_reference(tmp_path, (step for step in recorded(load(run), 2) if step is not None))
    bug = "tensor: each rank's heads drop what the first heads drop"
    with Ranks(2) as ranks:
        case = "distributed.test_parity_tool:compared", str(tmp_path), [*run, "parallelism.tensor=2"]
        assert ranks.run(*case, bug) == [1, 0]
        printed = ranks.output(0)
        assert "different: step 1: gradient of token_embedding.weight is off by " in printed
        assert "in that step 28 of 28 gradients differ" in printed
        assert "same" not in printed
        assert ranks.run(*case, "") == [0, 0]
        assert ranks.output(0).splitlines()[-1].startswith("same: 2 steps, 28 tensors")
