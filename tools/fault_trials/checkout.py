"""Private copies of the checkout, each with a virtual environment that imports gptlite from the copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from gptlite.errors import ConfigError

PARTS = Path(__file__).parent
FINDER = "__editable___gptlite_*_finder.py"  # by which setuptools installs a checkout
SECTION = re.compile(r"^\[tool\.pytest\.ini_options\]\n.*?(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
KERNELS, FONTS = ".cache/gptlite/kernels", ".cache/matplotlib"  # parts of the user's home folder that copies begin with
KEPT = "torchinductor_*"  # compiled code in the temporary folder, by hash
COMPILERS = ("c++", "g++")


class Copy:
    """A copy of the checkout with uncommitted changes. Faults are planted in it, one at a time.

    Its folder contains `tree` (a git repository), `venv`, `home` and `tmp`. With `tests`, a git revision, the folder
    tests/ and pytest's section of pyproject.toml are of that revision. `source` may be the tree of another copy.
    `seed` is a folder beside it with the initial content of `home`. `compiled` is the folder of ccache.
    """

    def __init__(self, folder: Path, source: Path, tests: str | None = None, compiled: Path | None = None):
        self.folder, self.seed = folder, folder.parent / "seed"
        self.tree, self.venv, self.home, self.tmp = (folder / name for name in ("tree", "venv", "home", "tmp"))
        self._clone(source, tests)
        self._environment(compiled)
        self.clean()

    @property
    def python(self) -> Path:
        """Interpreter of the copy's virtual environment."""
        return self.venv / "bin" / "python"

    def plant(self, file: str, content: bytes) -> None:
        """Replace a file. The new modification time makes Python ignore the compiled original."""
        path = self.tree / file
        self._forget(path)
        path.write_bytes(content)
        newer = path.stat().st_mtime + 10
        os.utime(path, (newer, newer))

    def restore(self) -> None:
        """Undo all changes of the tree, and remove what the tests left in the other folders."""
        for line in self._git("status", "--porcelain", "--no-renames").splitlines():
            self._forget(self.tree / line[3:])
        self._git("reset", "-q", "--hard")
        self._git("clean", "-fdq")
        self.clean()

    def clean(self) -> None:
        """Empty the temporary folder and the home folder, apart from compiled code."""
        self.tmp.mkdir(exist_ok=True)
        for path in self.tmp.iterdir():
            if not path.match(KEPT):
                _remove(path)
        _remove(self.home)
        shutil.copytree(self.seed, self.home)

    def keep_kernels(self) -> None:
        """Add the compiled kernels to what the home folders of all copies begin with."""
        if (self.home / KERNELS).is_dir():
            shutil.copytree(self.home / KERNELS, self.seed / KERNELS, dirs_exist_ok=True)

    def environment(self) -> dict[str, str]:
        """Return the environment variables for processes of the copy."""
        hidden = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "XDG_CACHE_HOME")
        kept = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith("PYTEST_")}
        return kept | {
            "PATH": f"{self.venv / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}",
            "VIRTUAL_ENV": str(self.venv),
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "CCACHE_BASEDIR": str(self.tree),
            "CCACHE_NOHASHDIR": "1",
        }

    def _clone(self, source: Path, tests: str | None) -> None:
        self.folder.mkdir(parents=True)
        _run("git", "clone", "-q", "--shared", str(source), str(self.tree))
        self._git("remote", "remove", "origin")
        shown = _run("git", "-C", str(source), "ls-files", "-z", "-m", "-d", "-o", "--exclude-standard")
        for name in filter(None, shown.split("\0")):
            _remove(self.tree / name)
            if (source / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, self.tree / name)
        if tests:
            self._take_tests(source, tests)
        self._git("add", "-A")
        self._git("-c", "user.name=faults", "-c", "user.email=faults@localhost", "commit", "-qm", "x", "--allow-empty")

    def _take_tests(self, source: Path, revision: str) -> None:
        archive = subprocess.run(["git", "-C", str(source), "archive", revision, "tests"], capture_output=True)
        if archive.returncode:
            raise ConfigError(f"tests={revision} is not a git revision with a folder tests/")
        shutil.rmtree(self.tree / "tests")
        subprocess.run(["tar", "-x", "-C", str(self.tree)], input=archive.stdout, check=True)
        path = self.tree / "pyproject.toml"
        theirs = SECTION.search(_run("git", "-C", str(source), "show", f"{revision}:pyproject.toml"))
        if theirs:
            path.write_text(SECTION.sub(lambda _: theirs[0], path.read_text(encoding="utf-8")), encoding="utf-8")

    def _environment(self, compiled: Path | None) -> None:
        venv.create(self.venv, with_pip=False, symlinks=True)
        packages = next(self.venv.glob("lib/python*/site-packages"))
        parents = [path for path in sys.path if path.endswith("site-packages")]
        finder = next((path for parent in parents for path in Path(parent).glob(FINDER)), None)
        if finder is None:
            raise ConfigError("gptlite is not installed with `pip install -e`, so a copy of it cannot be installed")
        root = Path(re.search(r"'gptlite': '(.*?)/gptlite'", finder.read_text(encoding="utf-8"))[1])  # type: ignore[index]
        text = finder.read_text(encoding="utf-8").replace(f"'{root}/", f"'{self.tree}/")
        (packages / finder.name).write_text(text, encoding="utf-8")
        for name in ("fault_server.py", "fault_coverage.py"):
            shutil.copy2(PARTS / name, packages)
        # Paths in a .pth file are searched, but their own .pth files, which would install the original, are not read.
        starts = [
            f"import {finder.stem}; {finder.stem}.install()",
            "import fault_coverage; fault_coverage.start_in_child()",
        ]
        (packages / "_copy.pth").write_text("\n".join([*parents, *starts, ""]), encoding="utf-8")
        self._scripts(Path(sys.executable).parent, compiled)

    def _scripts(self, parent: Path, compiled: Path | None) -> None:
        """Copy the commands of the parent's environment, and let the compilers run under ccache if it is installed."""
        for script in parent.iterdir():
            target = self.venv / "bin" / script.name
            if target.exists() or not script.is_file() or script.stat().st_size > 100_000:
                continue
            first, newline, rest = script.read_bytes().partition(b"\n")
            if first.startswith(b"#!") and b"python" in first:
                target.write_bytes(f"#!{self.python}\n".encode() + rest if newline else first)
                target.chmod(0o755)
        ccache = shutil.which("ccache")
        for name in COMPILERS if ccache else ():
            if real := shutil.which(name):
                shim = self.venv / "bin" / name
                folder = f"CCACHE_DIR='{compiled}' " if compiled else ""
                shim.write_text(f'#!/bin/sh\n{folder}exec "{ccache}" "{real}" "$@"\n', encoding="utf-8")
                shim.chmod(0o755)

    def _git(self, *arguments: str) -> str:
        return _run("git", "-C", str(self.tree), *arguments)

    @staticmethod
    def _forget(path: Path) -> None:
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)


def copies(source: Path, number: int, tests: str | None, compiled: Path | None) -> tuple[Path, list[Copy]]:
    """Return a temporary folder and the copies in it. All copies are of the same state of the checkout."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    (folder / "seed").mkdir()
    for name in (KERNELS, FONTS):
        if (Path.home() / name).is_dir():
            shutil.copytree(Path.home() / name, folder / "seed" / name)
    first = Copy(folder / "0", source, tests, compiled)
    return folder, [first, *(Copy(folder / str(i), first.tree, None, compiled) for i in range(1, number))]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        subprocess.run(["chmod", "-R", "u+rwX", str(path)], check=False, capture_output=True)  # read-only test folders
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _run(*command: str | Sequence[str]) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError(f"{' '.join(map(str, command))} fails: {result.stderr.strip()[:300]}")
    return result.stdout
