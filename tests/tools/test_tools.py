"""Commands of gptlite and the scripts in tools/, as a user calls them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from run_files import without_plots

from gptlite.config.schema import CONF_DIR
from gptlite.invocation import COMMANDS

TOOLS = CONF_DIR.parent / "tools"


def call(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a new process."""
    start = ["-m", "gptlite", tool] if tool in COMMANDS else [str(TOOLS / f"{tool}.py")]
    command = [sys.executable, *start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def text(text: Path, kept: Path) -> Path:
    """The text in the same place in each test, as the run reads it again when it is evaluated."""
    return shutil.copyfile(text, kept / text.name)


@pytest.fixture
def trained(run: Callable, kept: Path) -> Path:
    """The folder of a tiny run, trained by the first test that needs it."""
    folder = kept / "a"
    if not folder.exists():
        with without_plots():
            assert run("a", f"run.dir={folder}", f"data.cache_dir={kept / 'cache'}")[0] == 0
    return folder


@pytest.mark.slow
def test_generate_streams_the_same_text_with_and_without_the_cache(trained: Path) -> None:
    arguments = (f"checkpoint={trained}", "prompt=the cat: {sat}", "max_tokens=40", "seed=3")
    cached, again, uncached = (call("generate", *arguments, *more) for more in ((), (), ("cache=false",)))
    assert cached.returncode == 0, cached.stderr
    assert cached.stdout.startswith("the cat: {sat}")
    assert len(cached.stdout) > 30
    assert cached.stdout == again.stdout == uncached.stdout
    assert call("generate", *arguments, "seed=4").stdout != cached.stdout


def test_eval_agrees_with_the_run_and_reads_any_text(trained: Path, text: Path, script: Callable) -> None:
    result = json.loads((trained / "result.json").read_text())
    same = script("eval", f"checkpoint={trained}", "samples=8", "precision=fp32")
    assert same.code == 0, same.err
    row = json.loads(same.out.splitlines()[-1])
    assert row["loss"] == pytest.approx(result["val_loss"], rel=1e-6)
    assert row["bits_per_byte"] == pytest.approx(result["val_bits_per_byte"], rel=1e-6)
    whole = script("eval", f"checkpoint={trained}", f"data={text}")
    assert json.loads(whole.out.splitlines()[-1])["tokens"] == len(text.read_bytes())


def test_eval_takes_a_prepared_folder_and_its_name(trained: Path, text: Path, tmp_path: Path, script: Callable) -> None:
    """As train does: data=mine is ./data/mine, of which the held-out part is read."""
    output = tmp_path / "data" / "mine"
    made = script("preprocess", f"input={text}", "separator=.\\n", "tokenizer=byte", f"output={output}")
    assert made.code == 0, made.err
    rows = []
    for source in ("mine", "data/mine", str(output)):
        read = script("eval", f"checkpoint={trained}", f"data={source}", "precision=fp32", cwd=tmp_path)
        assert read.code == 0, read.err
        rows.append(read.out.splitlines()[-1])
    assert len(set(rows)) == 1
    assert 0 < json.loads(rows[0])["tokens"] < len(text.read_bytes()) / 5
    nothing = script("eval", f"checkpoint={trained}", "data=mime", cwd=tmp_path)
    assert (nothing.code, "data=mime is neither a path nor a preset" in nothing.err) == (2, True)


REFUSED = [
    ("generate", ["checkpoint=nowhere"], "checkpoint=nowhere does not exist"),
    ("generate", ["checkpoint=.", "temperature=nan"], "temperature=nan"),
    ("generate", ["checkpoint=.", "top_p=0"], "top_p=0"),
    ("generate", ["checkpoint=.", "max_tokens=0"], "max_tokens=0 must be at least 1"),
    ("generate", ["checkpoint=.", "temprature=1"], "did you mean temperature?"),
    ("eval", ["checkpoint=nowhere"], "checkpoint=nowhere does not exist"),
    ("eval", ["checkpoint=.", "samples=0"], "samples=0 must be at least 1"),
    ("bench_step", ["sizes=huge"], "sizes=huge"),
    ("bench_step", ["peer=nowhere", "sizes=char"], "peer=nowhere"),
    ("bench_preprocess", ["tokenizer=byte"], "text is not set"),
    ("bench_preprocess", ["tokenizer=byte", "text=nowhere", "megabytes=0"], "megabytes=0"),
    ("bench_preprocess", ["tokenizer=byte", "text=nowhere", "workers=1,0"], "workers=1,0"),
    ("bench_preprocess", ["tokenizer=byte", "text=nowhere"], "text=nowhere"),
    ("bench_step", ["others=moun"], "others=moun"),
    ("bench_step", ["precision=fp32,bf16"], "precision=fp32,bf16"),
    ("compare_nanogpt", ["peer=nowhere"], "peer=nowhere"),
    ("compare_curves", ["nanogpt=nowhere", "peers=llama,bert"], "peers=llama,bert: bert unknown"),
    ("compare_curves", ["nanogpt=nowhere"], "nanogpt=nowhere has no model.py"),
]


@pytest.mark.parametrize(("tool", "arguments", "named"), REFUSED)
def test_a_tool_refuses_in_one_line(tool: str, arguments: list[str], named: str, script: Callable) -> None:
    code, _, err = script(tool, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert named in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("tool", "arguments", "named"), {each[0]: each for each in REFUSED}.values())
def test_a_tool_refuses_in_a_process_of_its_own(tool: str, arguments: list[str], named: str) -> None:
    done = call(tool, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_eval_refuses_data_of_another_tokenizer(trained: Path, script: Callable) -> None:
    code, _, err = script("eval", f"checkpoint={trained}", "data=synthetic")
    assert code == 2
    assert "data=synthetic has another tokenizer" in err


@pytest.mark.slow
def test_bench_step_times_a_step() -> None:
    result = call("bench_step", "sizes=char", "repeats=2", "precision=fp32")
    assert result.returncode == 0, result.stderr
    assert "tok/s" in result.stdout


@pytest.mark.long
@pytest.mark.parametrize("overrides", [[], ["trainer.compile=true", "parallelism.activation_checkpointing=selective"]])
def test_the_default_run_learns_shakespeare(tmp_path: Path, overrides: list[str]) -> None:
    """The main job, cut to 60 steps: it downloads, tokenizes, trains, and is below 6.4 nats a token."""
    command = [sys.executable, str(TOOLS.parent / "train.py"), "trainer.max_steps=60", f"data.cache_dir={tmp_path}"]
    more = [f"run.dir={tmp_path / 'run'}", "trainer.eval_samples=64", *overrides]
    result = subprocess.run([*command, *more], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["val_loss"] < 6.4
    sample = result.stdout.partition("== sample")[2].partition("== results")[0].partition("=\n")[2]
    assert len(sample.split()) > 20, result.stdout  # 200 tokens, of which a model this young writes many line breaks
