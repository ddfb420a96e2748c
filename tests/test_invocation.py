"""Every command that is printed exists where it is printed: in a checkout, beside one, and from an installed wheel."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import forked
import pytest

import gptlite
from gptlite import invocation
from gptlite.invocation import COMMANDS, command, localized, recipe

ROOT = Path(__file__).parents[1]
PACKAGES = ("gptlite", "kernels", "data")
# What no text may have: a command of a checkout alone, or one that there no longer is.
FIXED = re.compile(
    r"python (train|tools)|\btools/\w+\.py|(?<!`)\btrain\.py (\w+\.|--|-m)|gptlite-(data|checkpoint|kernels) "
)
HINT = re.compile(r"(?:^ *|`)gptlite ([a-z][\w-]*)", re.MULTILINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel holds."""
    site = tmp_path_factory.mktemp("site")
    for source, target in (("gptlite", "."), ("conf", "conf"), ("kernels", "kernels"), ("data", "recipes")):
        ignored = shutil.ignore_patterns("__pycache__", "*.bin", "*.idx", "*.txt")
        shutil.copytree(ROOT / source, site / "gptlite" / target, dirs_exist_ok=True, ignore=ignored)
    return site


def run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a folder; every word is as a person types it."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean | {"PYTHONPATH": str(site), "PATH": tools}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@dataclass
class Code:
    """What is read in the code of all packages."""

    texts: list[tuple[str, str]] = field(default_factory=list)  # where each string is; of an f-string, its fixed parts
    asked: set[str] = field(default_factory=set)  # the commands of `command("plan")` and the like


@pytest.fixture(scope="module")
def code() -> Code:
    code = Code()
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                code.texts.append((f"{path.relative_to(ROOT)}:{node.lineno}", node.value))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
                name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                if node.func.id in ("command", "written", "arguments") and isinstance(name, str):
                    code.asked.add(name)
    return code


def test_no_text_has_a_command_of_a_checkout(code: Code):
    assert [(place, text) for place, text in code.texts if FIXED.search(text)] == []


def test_a_text_names_only_commands_that_there_are(code: Code):
    reasons = "gptlite/satellites/deepspeed/"  # its texts are sentences about gptlite
    hints = ((place, text) for place, text in code.texts if not place.startswith(reasons))
    named = [(place, match[1]) for place, text in hints for match in HINT.finditer(text)]
    assert {name for _, name in named} >= {"train", "plan", "data", "generate"}  # else the filter has a hole
    assert [each for each in named if each[1] not in COMMANDS] == []


def test_the_hints_ask_for_commands_that_there_are(code: Code):
    """`command("plan")`, wherever it is called: a wrong name would only fail when it is printed."""
    assert code.asked
    assert code.asked <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_module_with_a_main(name: str):
    assert find_spec(COMMANDS[name][0])


def test_train_and_recipes_are_scripts_in_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    python = invocation.python()
    monkeypatch.chdir(ROOT)
    assert command("train") == f"{python} train.py"
    assert recipe("kjv") == f"{python} data/kjv/prepare.py"
    monkeypatch.chdir(ROOT / "data")
    assert recipe("kjv") == f"{python} kjv/prepare.py"
    monkeypatch.chdir(tmp_path)
    assert command("train") == f"{python} {shlex.quote(str(ROOT / 'train.py'))}"


def test_elsewhere_it_is_the_installed_command_or_pythons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(gptlite, "__file__", str(tmp_path / "site" / "gptlite" / "__init__.py"))
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name in ("python", "gptlite"):
        (scripts / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))  # an environment that nobody has activated
    assert command("plan") == f"{scripts / 'python'} -m gptlite plan"
    monkeypatch.setenv("PATH", str(scripts))
    assert command("plan") == "gptlite plan"
    assert localized("`gptlite train-tokenizer`, python data/kjv/prepare.py output=F") == (
        "`gptlite train-tokenizer`, python -m gptlite.recipes.kjv.prepare output=F"
    )
    (scripts / "gptlite").unlink()
    assert command("plan") == "python -m gptlite plan"


@pytest.mark.parametrize("where", ["installed", pytest.param("checkout", marks=pytest.mark.slow)])
def test_every_command_of_the_help_has_a_help_with_its_own_name(where: str, installed: Path, tmp_path: Path):
    def python(*words: str) -> subprocess.CompletedProcess[str]:
        if where == "installed":
            return run(installed, tmp_path, sys.executable, *words)
        return forked.run(*words, folder=ROOT)

    shown = python("-m", "gptlite", "--help")
    assert shown.returncode == 0, shown.stderr
    names = re.findall(r"^  ([a-z-]+) ", shown.stdout, re.MULTILINE)
    assert names == list(COMMANDS)
    for name in {"train", "plan", "train-tokenizer", "data"} & set(names):
        given = python("-m", "gptlite", name, "--help")
        assert given.returncode == 0, given.stderr
        if where == "installed":
            assert ".py" not in given.stdout.replace("inspect", "")
        for start in sorted(set(re.findall(r"python (-m gptlite \S+|\S+\.py)", given.stdout))):
            again = python(*start.split(), "--help")
            assert again.returncode == 0, (start, again.stderr)


def test_a_new_package_beside_an_installed_wheel(installed: Path, tmp_path: Path):
    made = run(installed, tmp_path, sys.executable, "-m", "gptlite", "new", "mine")
    assert made.returncode == 0, made.stderr
    train = shlex.split(made.stdout.splitlines()[-1].removeprefix("cd mine && "))
    shown = run(installed, tmp_path / "mine", *train, "--cfg", "job")
    assert shown.returncode == 0, shown.stderr
    assert "name: mine" in shown.stdout


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--version"], 0, f"gptlite {gptlite.__version__}\n"),
        (["model=gpt2", "--cfg", "job"], 0, "seed: 1234\n"),
        (["--cfg", "job"], 0, "seed: 1234\n"),
        (["train", "--cfg", "job"], 0, "seed: 1234\n"),
        ([], 0, "gptlite: GPT pretraining"),
        (["trian"], 2, "error: trian is neither a gptlite command nor KEY=VALUE; did you mean train?; --help"),
        (["sweep", "optimizer.lr=1,2", "--cfg", "job"], 2, "error: --cfg shows one configuration, but -m has several"),
        (["--hlep"], 2, "error: unrecognized arguments: --hlep; did you mean --help?"),
        (["optimizer.lrr=1"], 2, "error: optimizer.lrr is not a key"),
    ],
    ids=["version", "override", "flag", "train", "nothing", "slip", "shown", "flag_slip", "refused"],
)
def test_the_first_argument_is_a_command_an_override_or_a_flag(
    words: list[str], status: int, said: str, tmp_path: Path
):
    done = forked.run("-m", "gptlite", *words, folder=tmp_path)
    assert done.returncode == status, done.stderr
    assert (done.stderr if status else done.stdout).startswith(said)
    assert list(tmp_path.iterdir()) == []


def test_the_dispatcher_loads_nothing_heavy():
    code = "import sys, gptlite.__main__; print(*{'torch', 'hydra', 'numpy', 'omegaconf'} & set(sys.modules))"
    assert run(ROOT, ROOT, sys.executable, "-c", code).stdout.strip() == ""


TORCHRUN = """
import os, subprocess, sys
command = [sys.executable, "-u", *sys.argv[2:]]
subprocess.run(command, check=True, env=os.environ | {"RANK": "0", "WORLD_SIZE": "2"})
"""
RANK = "from gptlite.invocation import launched_command; print(launched_command())"


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_a_command_to_continue_has_the_launcher_of_this_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchrun").write_text(f"#!{sys.executable}\n{TORCHRUN}")
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["torchrun", "--nproc-per-node=2", str(tmp_path / "rank.py"), "seed=1 2"]
    started = subprocess.run(words, capture_output=True, text=True, check=True)
    assert started.stdout == f"torchrun --nproc-per-node=2 {shlex.join(invocation.arguments('train'))}\n"
    # A rank that train.py starts has a command line of its own, and so has one without a launcher.
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    alone = subprocess.run([sys.executable, tmp_path / "rank.py"], capture_output=True, text=True, check=True)
    assert alone.stdout == f"{command('train')}\n"


def test_a_command_to_continue_has_sruns_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("TASKS", "8"), ("NODES", "2")):
        monkeypatch.setenv(f"SLURM_STEP_NUM_{name}", number)
    assert invocation.launched_command() == f"srun --nodes=2 --ntasks=8 {command('train')}"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # train.py starts the ranks
    assert invocation.launched_command() == command("train")
