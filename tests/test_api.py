"""The Python API: `from gptlite import load, pretrain, launch`, and what it leaves as it was in a notebook."""

import ast
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from distributed.cells.run import Ranks
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from listeners import listening
from marking import marked

import gptlite
from gptlite import ConfigError, Result, RunFailed, launch, load, pretrain
from gptlite.config.schema import CONF_DIR
from gptlite.files import try_lock

ROOT = Path(__file__).parents[1]
TINY = """
data=synthetic data.vocab_size=64 data.num_tokens=20000 data.global_batch_size=4 data.micro_batch_size=2
model=gpt-lite model.num_layers=2 model.num_heads=2 model.d_model=32 model.sequence_length=16 precision=fp32
schedule=constant schedule.warmup_steps=1 trainer.max_steps=4 trainer.eval_samples=4 trainer.sample_tokens=0
trainer.log_interval=1 checkpoint.interval=1000000
""".split()
TWO = ["parallelism=zero1", "parallelism.data=2"]


def tiny(folder: Path, *overrides: str) -> Any:
    return load([*TINY, f"run.dir={folder}", *overrides])


def python(code: str) -> str:
    """What a program prints, in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_names_win_over_the_modules_of_their_name():
    code = "import gptlite.launch.worker; from gptlite import launch, load; print(launch.__name__, load.__name__)"
    assert python(code) == "launch load"
    module = sys.modules["gptlite.pretrain"]
    assert module.pretrain is not pretrain  # which attaches what observes a run to it
    gptlite.pretrain = module  # as an import of the module does
    assert gptlite.pretrain is pretrain
    with pytest.raises(AttributeError, match="'gptlite' has no attribute 'lunch'"):
        _ = gptlite.lunch  # type: ignore[attr-defined]


def test_the_package_imports_nothing_heavy():
    code = "import sys, gptlite; print(*({'torch', 'hydra', 'numpy', 'matplotlib'} & set(sys.modules)))"
    assert python(code) == ""


def test_public_names_are_typed_and_exist():
    tree = ast.parse((ROOT / "gptlite" / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == gptlite._PUBLIC
    assert sorted(gptlite._PUBLIC) == sorted(gptlite.__all__)
    assert all(getattr(gptlite, name).__doc__ for name in gptlite.__all__)
    assert set(gptlite.__all__) <= set(dir(gptlite))
    assert (ROOT / "gptlite" / "py.typed").is_file()


def test_load_leaves_the_hydra_of_others_alone():
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        others = GlobalHydra.instance().hydra
        load(["seed=3"])
        assert GlobalHydra.instance().hydra is others
        assert compose("config", overrides=["seed=5"]).seed == 5
    assert not GlobalHydra.instance().is_initialized()


WRONG: dict[str, Callable[[Path], object]] = {
    r"modle is not a key; did you mean model": lambda folder: load(["modle=gpt2"]),
    r"model=gpt9 does not exist": lambda folder: load(["model=gpt9"]),
    r"the overrides must be a list; use load\(\['seed=1'\]\)": lambda folder: load("seed=1"),
    r"takes strings KEY=VALUE and GROUP=PRESET, not '--help'": lambda folder: load(["--help"]),
    r"GROUP=PRESET, not 3": lambda folder: load([3]),  # type: ignore[list-item]
    r"\['seed=1'\] is not a Config; compose one with gptlite\.load": lambda folder: launch(["seed=1"]),  # type: ignore
    r"\{\} is not a Config": lambda folder: pretrain({}),  # type: ignore[arg-type]
    r"world size 1 = .*parallelism\.tensor=2": lambda folder: launch(tiny(folder, "parallelism=tp2"), ranks=1),
    r"world size 3 is not": lambda folder: launch(tiny(folder, *TWO), ranks=3),
    r"ranks=0: give a number of processes": lambda folder: launch(tiny(folder), ranks=0),
    r"ranks='2': give a number": lambda folder: launch(tiny(folder), ranks="2"),  # type: ignore[arg-type]
    r"world size 1 is not": lambda folder: pretrain(tiny(folder, *TWO)),
    r"no module named nowhere": lambda folder: load(["plugins=[nowhere]"]),
    r"has no integer solution": lambda folder: launch(tiny(folder, "data.global_batch_size=3", *TWO)),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_line_and_leaves_nothing(words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        WRONG[words](tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_handlers_need_the_main_thread(tmp_path: Path) -> None:
    found: list[Exception] = []

    def attempt() -> None:
        try:
            launch(tiny(tmp_path / "run"), handle_signals=True)
        except ConfigError as error:
            found.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "handle_signals=True works only in the main thread" in str(found[0])


def state() -> dict[str, Any]:
    """What a notebook would miss if a run had changed it."""
    until = time.monotonic() + 5
    while (threads := threading.enumerate()) != [threading.main_thread()] and time.monotonic() < until:
        time.sleep(0.05)  # a sampler's last interval
    return {
        "threads": [thread.name for thread in threads if "pytest" not in thread.name and "execnet" not in thread.name],
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "arguments": list(sys.argv),
        "streams": (sys.stdout, sys.stderr),
        "logging": (logging.root.manager.disable, logging.root.level, list(logging.root.handlers)),
        "torch": (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), dist.is_initialized()),
        "generator": torch.random.get_rng_state().tolist(),
        "hydra": GlobalHydra.instance().is_initialized(),
    }


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process that has trained: torch starts threads once."""
    launch(tiny(tmp_path_factory.mktemp("warm") / "run", "trainer.max_steps=2"))


OFFLOADED = ["parallelism=zero3_cpu_offload", "parallelism.data=1"]


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("more", "handle_signals"), marked([([], True), (OFFLOADED, False), ([], False), (OFFLOADED, True)], 2, 2)
)
def test_one_rank_changes_nothing_of_its_process(more: list[str], handle_signals: bool, tmp_path: Path) -> None:
    before = state()
    result = launch(tiny(tmp_path / "run", *more), handle_signals=handle_signals)
    assert state() == before
    assert (result.exit_code, result.outcome, result.folder) == (0, "done", tmp_path / "run")
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000004"
    assert result.checkpoint.is_dir()
    assert result.metrics["step"] == 4
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {**result.metrics, "status": "done", "checkpoint": str(result.checkpoint)} == written
    assert result.curves is not None
    assert result.curves._repr_png_().startswith(b"\x89PNG")
    assert Path(result.curves) == Path(str(result.curves)) == tmp_path / "run" / "curves.png"


@pytest.fixture
def ranks() -> Iterator[None]:
    """Ranks begin with what they import imported."""
    with forked.forked_ranks():
        yield


@pytest.mark.usefixtures("ranks")
@pytest.mark.slow
def test_several_layouts_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    before = state()
    first = launch(tiny(Path("run")))
    second = launch(load(["run.dir=run", *TWO, "trainer.max_steps=6"]))  # resumed: the run's own keys, and these
    assert state() == before
    assert (first.metrics["world_size"], second.metrics["world_size"]) == (1, 2)
    assert (second.exit_code, second.outcome, second.metrics["step"]) == (0, "done", 6)
    assert second.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000006"
    output, errors = capfd.readouterr()
    assert output.count("step 6/6  loss") == 1
    assert "data 2 (zero 1)" in output
    assert re.findall(r"^  memory +(rank 0: )?parameters", output, re.MULTILINE) == ["", "rank 0: "]  # as predicted
    assert errors == ""
    again = launch(load(["run.dir=run"]), ranks=2)  # complete
    assert again == second


@pytest.mark.slow
def test_the_layout_takes_the_ranks_it_is_given(tmp_path: Path) -> None:
    result = launch(tiny(tmp_path / "run", "parallelism=zero1", "data.micro_batch_size=1"), ranks=4)
    assert result.metrics["layout"] == "data 4 (zero 1)"
    single = launch(tiny(tmp_path / "single", "parallelism=zero1"), ranks=1)
    assert single.metrics["world_size"] == 1
    assert single.metrics["val_loss"] == pytest.approx(result.metrics["val_loss"], abs=1e-4)


@pytest.mark.usefixtures("ranks")
def test_a_folder_in_use_is_refused_by_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "train.log").open("w") as log:
        assert try_lock(log)
        with pytest.raises(ConfigError, match=r"run\.dir=\S+: another process is training in it; wait") as refused:
            launch(tiny(tmp_path / "run", *TWO))
    assert "\n" not in str(refused.value)


FAILING = """
import os
import re
from gptlite.trainer.step import Step
begin = Step.begin
def failing(self, state, *given, **more):
    if os.environ.get("RANK", "1") == "1" and state.step == 2:
        raise KeyError("a shard is missing")
    return begin(self, state, *given, **more)
Step.begin = failing
"""


@pytest.mark.usefixtures("ranks")
def test_a_rank_that_fails_is_an_exception_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "api_failing_plugin.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    from gptlite.trainer.step import Step

    monkeypatch.setattr(Step, "begin", Step.begin)  # restored after the plugin has replaced it here
    config = tiny(tmp_path / "run", *TWO, "plugins=[api_failing_plugin]")
    before = state()
    with pytest.raises(RunFailed, match=r"^rank 1 failed: KeyError: 'a shard is missing'$"):
        launch(config)
    with pytest.raises(KeyError, match="a shard is missing"):  # of one rank it is the error itself
        launch(tiny(tmp_path / "single", "plugins=[api_failing_plugin]"))
    assert state() == before


def test_a_result_says_how_a_run_ended(tmp_path: Path) -> None:
    assert Result.read(tmp_path, 0) == Result(tmp_path, 0, "done", {}, None, None)
    content = {"status": "diverged: loss nan", "checkpoint": None, "step": 3}
    (tmp_path / "result.json").write_text(json.dumps(content))
    assert Result.read(tmp_path, 1) == Result(tmp_path, 1, "diverged: loss nan", {"step": 3}, None, None)
    assert Result.read(tmp_path, 130).outcome == "stopped: signal"
    stopped = {"status": "done", "checkpoint": "elsewhere/run/checkpoints/step-00000003"}
    assert Result.of(tmp_path, 0, stopped).checkpoint == tmp_path / "checkpoints" / "step-00000003"


# With tabulate, torch reports compile times at exit, after which Python exits with 1 instead of the signal.
PROGRAM = """
import sys
sys.modules["tabulate"] = None
from gptlite import launch, load
result = launch(load(sys.argv[2:]), handle_signals=sys.argv[1] == "handled")
print("ended", result.exit_code, result.outcome, result.checkpoint is not None)
"""


def processes_in(folder: Path) -> list[int]:
    """The processes whose working directory this is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == folder:
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("how", "number", "ranks"),
    [
        ("plain", signal.SIGINT, 2),
        pytest.param("plain", signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param("plain", signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param("handled", signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param("handled", signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_ends_every_rank(how: str, number: int, ranks: int, tmp_path: Path) -> None:
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    words = [*TINY, "run.dir=run", "trainer.max_steps=1000000", *(TWO if ranks == 2 else ())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        popen = forked.Popen if Ranks.fork else subprocess.Popen
        process = popen(
            [sys.executable, "-c", PROGRAM, how, *words], cwd=here, env=environment, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
    until = time.monotonic() + 200
    while not (rows := here / "run" / "metrics.jsonl").exists() or not rows.stat().st_size:
        assert process.poll() is None, (tmp_path / "err").read_text()
        assert time.monotonic() < until
        time.sleep(0.05)
    running = processes_in(here)
    assert len(running) >= (1 if ranks == 1 else 4)  # this script, the launcher, the ranks
    listeners = listening(running)
    assert all(each.is_loopback for each in listeners), listeners
    assert len(listeners) >= (0 if ranks == 1 else 3)  # the store, and gloo in each rank
    process.send_signal(number)
    try:
        returncode = process.wait(60)
    finally:
        process.kill()
    output, errors = ((tmp_path / name).read_text() for name in ("out", "err"))
    until = time.monotonic() + 10
    while left := processes_in(here):
        assert time.monotonic() < until, left
        time.sleep(0.05)
    if how == "handled":
        assert f"ended {128 + number} stopped: signal True" in output
    else:
        assert returncode == -number
        assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
        assert "ended" not in output
    if number != signal.SIGKILL:
        assert [path.name for path in temporary.iterdir() if path.name.startswith("gptlite")] == []
