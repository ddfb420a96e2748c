"""`gptlite kernels`."""

import contextlib
import io
import subprocess
import sys
from unittest import mock

import pytest

from gptlite.commands.kernels import HELP, SUBCOMMANDS, main
from gptlite.invocation import command, localized
from gptlite.kernels import info


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process: each of its own would import torch."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["gptlite-kernels", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as exit,
    ):
        main()
    code = exit.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_help_names_every_subcommand():
    assert all(f"  {name} " in HELP for name in SUBCOMMANDS)
    result = tool()
    assert (result.returncode, result.stdout.strip()) == (0, localized(HELP))
    for name in SUBCOMMANDS:
        result = tool(name, "--help")
        assert result.returncode == 0
        assert f"{command('kernels')} {name}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["biuld"], "biuld is not one of build, info, test, bench; did you mean build?"),
        (["build", "cuda=maybe"], "cuda=maybe is not one of auto, true, false"),
        (["build", "arch=hopper"], "arch=hopper is not auto, any or an architecture such as 80 or 90"),
        (["build", "gpu=true"], "gpu is not a key of this tool"),
        (["bench", "dtype=float64"], "dtype=float64 is not one of float32, bfloat16, float16"),
        (["bench", "ops=layernorm"], "did you mean layer_norm?"),
        (["bench", "repeats=0"], "repeats=0 measures nothing"),
        (["bench", "repeats=many"], "repeats=many"),
        (["test", "device=tpu"], "device=tpu is not one of cpu, cuda"),
        (["bench", "device=tpu"], "device=tpu is not one of cpu, cuda"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: list[str], message: str):
    result = tool(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_info_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(info, "compiled", lambda: None)
    monkeypatch.setattr(info, "load", None)  # which would compile
    result = tool("info")
    assert result.returncode == 0
    assert f"not compiled yet; `{command('kernels')} build` or the first run with kernels compiles it" in result.stdout


@pytest.mark.slow
def test_build_info_test_and_bench():
    build = tool("build")
    assert build.returncode == 0, build.stdout + build.stderr
    assert "kernels, compiled" in build.stdout
    info = tool("info")
    assert info.returncode == 0
    assert "layer_norm" in info.stdout
    assert "fused (" in info.stdout
    check = tool("test")
    assert check.returncode == 0, check.stdout
    assert check.stdout.rstrip().endswith("all within the tolerance")
    bench = tool("bench", "ops=layer_norm", "compile=false", "repeats=1")
    assert bench.returncode == 0, bench.stderr
    assert "layer_norm" in bench.stdout
