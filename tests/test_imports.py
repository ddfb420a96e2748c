"""Imports flow one way, held by reading every import statement.

A new package under gptlite/ needs a row in ROOMS; widening a row is a change of architecture (docs/decisions/).
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gptlite"
SATELLITES = PACKAGE / "satellites"
MAPPED = {"kernels": ROOT / "kernels", "recipes": ROOT / "data"}  # as pyproject.toml maps them


@dataclass(frozen=True)
class Import:
    """One imported module. `lazy`: in a function or under TYPE_CHECKING, so not at import time."""

    path: Path
    line: int
    module: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


@dataclass(frozen=True)
class Room:
    """What a room may import: rooms of gptlite, packages, and `lazy`: packages that must not load with the room."""

    rooms: str = ""
    packages: str = ""
    lazy: str = ""


# Every room may import itself, gptlite (its version) and these, which import nothing.
LEAVES = "cpu errors files invocation limits progress unpickle".split()
SHARED = [*LEAVES, "documents"]  # what every other room may import
# Lowest layer first.
ROOMS = {
    **{leaf: Room() for leaf in LEAVES},
    "files": Room("errors"),
    "progress": Room("errors"),
    "invocation": Room("errors"),
    "documents": Room(lazy="yaml"),
    "torch_private": Room(packages="torch"),
    "kernels": Room(packages="torch"),
    "ops": Room("kernels", packages="torch", lazy="apex"),
    "parallelism": Room("ops", packages="torch"),
    "precision": Room(lazy="torch"),  # the schema imports it for its dataclass
    "metrics": Room(packages="torch", lazy="tensorboard wandb"),
    "tokenizers": Room(
        packages="numpy sentencepiece tiktoken tiktoken_ext tokenizers",
    ),
    "data": Room("ops parallelism tokenizers", packages="torch numpy", lazy="hydra"),
    "models": Room("ops", packages="torch", lazy="hydra"),
    "optimizer": Room("ops parallelism", packages="numpy torch", lazy="hydra"),
    "checkpoint": Room("parallelism", packages="torch"),
    # Of a room, the configuration knows its dataclasses and what checks them.
    "config": Room(
        "checkpoint data metrics models ops optimizer parallelism precision",
        packages="hydra omegaconf yaml",  # PyYAML comes with omegaconf
    ),
    "trainer": Room(
        "checkpoint config data metrics models ops optimizer parallelism precision tokenizers", packages="torch"
    ),
    "pretrain": Room("config parallelism trainer"),
    "launch": Room(
        "checkpoint config data models ops parallelism trainer",
        packages="torch",
    ),
    # Satellites.
    "activations": Room("parallelism", packages="torch"),
    "monitor": Room("parallelism trainer", packages="torch"),
    "compressed": Room("config kernels optimizer parallelism precision", packages="torch"),
    "zeropp": Room("compressed config parallelism", packages="torch"),
    "noise": Room("compressed config data optimizer parallelism trainer zeropp", packages="torch"),
    "corpus": Room("data parallelism tokenizers", packages="numpy", lazy="datasets"),
    "samples": Room("data parallelism", packages="numpy torch"),
    "optimizers": Room("ops optimizer parallelism", packages="torch", lazy="torchao"),
    "nvme": Room("metrics optimizer parallelism", packages="torch"),
    "graph": Room("data ops optimizer parallelism trainer", packages="torch"),
    "deterministic": Room(
        "compressed config models noise ops optimizer parallelism precision zeropp", packages="torch"
    ),
    "onebit": Room("compressed config optimizer optimizers parallelism", packages="torch"),
    "plots": Room("metrics trainer", lazy="matplotlib numpy"),
    "plan": Room(
        "compressed config data kernels metrics models monitor onebit ops optimizer optimizers parallelism plots "
        "precision samples trainer zeropp",
        packages="numpy torch",
        lazy="matplotlib yaml",
    ),
    "preprocess": Room("corpus data tokenizers", packages="numpy", lazy="pyarrow zstandard"),
    "deepspeed": Room("config precision"),
    "huggingface": Room("models", packages="torch"),
    "images": Room("corpus data samples", packages="numpy torch", lazy="PIL datasets"),
    "parity": Room("config launch parallelism precision trainer", packages="torch"),
    "certify": Room(
        "checkpoint config data kernels launch metrics models ops onebit optimizer parallelism parity plan precision "
        "pretrain samples trainer",
        packages="torch",
        lazy="jinja2",
    ),
    "elastic": Room(
        "checkpoint config data launch metrics monitor noise optimizer parallelism plan trainer zeropp",
        packages="torch",
    ),
    "start": Room(
        "certify compressed config deepspeed deterministic elastic graph launch metrics monitor noise onebit "
        "parallelism plan plots pretrain trainer zeropp",
        packages="torch",
    ),
    "engine": Room(
        "checkpoint config data deepspeed launch models ops parallelism precision samples trainer",
        packages="numpy torch",
    ),
    "sweep": Room(
        "checkpoint config launch metrics parallelism plan plots start trainer",
        packages="hydra numpy omegaconf",
        lazy="jinja2 matplotlib",
    ),
    "checkpoint_tool": Room(
        "config checkpoint corpus data huggingface metrics models ops tokenizers",
        packages="torch omegaconf",
        lazy="transformers",
    ),
    "data_tool": Room("config corpus data metrics plots tokenizers", packages="numpy", lazy="matplotlib"),
    "harness": Room("data models ops parallelism tokenizers", packages="lm_eval torch"),
    "template": Room("data models ops", lazy="torch"),  # the files of `gptlite new`
    "recipes": Room("config corpus", packages="numpy", lazy="sentencepiece"),
    # The commands, which compose the others.
    "commands": Room(
        "certify checkpoint config corpus data deepspeed elastic harness launch models parallelism parity plan "
        "precision preprocess start sweep trainer tokenizers",
        packages="hydra numpy omegaconf",
        lazy="torch",
    ),
    "__main__": Room("elastic"),  # its proxy, which imports nothing
}
# A submodule that may import more than its room.
WIDER = {
    PACKAGE / "models" / "parallelize.py": "parallelism precision",
    PACKAGE / "models" / "base.py": "parallelism precision",  # for types alone
    PACKAGE / "models" / "spec.py": "parallelism",  # for types alone
    PACKAGE / "models" / "capabilities.py": "parallelism",  # for types alone
    PACKAGE / "models" / "model.py": "parallelism precision",
    PACKAGE / "models" / "gpt" / "spec.py": "parallelism precision",  # for types alone
    PACKAGE / "models" / "gpt" / "model.py": "precision",  # for types alone
    PACKAGE / "models" / "experts.py": "parallelism",
    PACKAGE / "models" / "parallel_layers.py": "parallelism",
    PACKAGE / "models" / "batch_norm.py": "parallelism",  # statistics over the data ranks
    PACKAGE / "models" / "init.py": "parallelism",  # which box of a weight is this rank's
    PACKAGE / "models" / "gpt" / "generate.py": "parallelism",  # through the parts of a pipeline
}
# Construction and folder of a run, and a plan: these know the whole configuration, the rest of both rooms sections.
COMPOSING = {
    # Several sections together choose a reduction, and rule it out.
    *(SATELLITES / "compressed" / f"{name}.py" for name in ("build", "check")),
    *(SATELLITES / "deterministic" / f"{name}.py" for name in ("build", "check")),
    *(SATELLITES / "noise" / f"{name}.py" for name in ("build", "checks")),
    SATELLITES / "onebit" / "reduction.py",
    *(SATELLITES / "zeropp" / f"{name}.py" for name in ("build", "check")),
    *(SATELLITES / "plan" / f"{name}.py" for name in "advice banner largest links planning report tuning".split()),
    *(PACKAGE / "trainer" / f"{name}.py" for name in "banner build folder restore summary".split()),
}
# Dataclasses of their users, and the list to which plug-ins add their checks.
SECTIONS = "gptlite.config.cluster.", "gptlite.config.trainer.", "gptlite.config.plugins.CHECKS"
CONFIG_USERS = set(
    "certify checkpoint_tool commands config data_tool deepspeed elastic engine launch parity pretrain start "
    "sweep".split()
)
# What training, resuming, evaluating and generating on any layout needs. All other rooms are satellites.
CORE = {
    *("checkpoint config data kernels launch metrics models ops optimizer parallelism precision".split()),
    *("pretrain", "tokenizers", "torch_private", "trainer", *SHARED),
}


def test_every_room_has_a_row():
    inside, beside = [
        {path.name for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
        for folder in (SATELLITES, PACKAGE)
    ]
    modules = {path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert inside | beside | modules | set(MAPPED) == {*ROOMS, "satellites"}
    # The folder shows which is which. Beside it: what composes core and satellites, and the template of a package.
    assert inside == set(ROOMS) - CORE - {"start", "commands", "__main__", "template", "recipes"}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_what_it_may(name):
    room = ROOMS[name]
    refused = []
    for path in files_of(name):
        leaves = () if name in LEAVES else SHARED
        rooms = {"", "__version__", name, *leaves, *room.rooms.split(), *WIDER.get(path, "").split()}
        for found in imports_of(path):
            top = found.module.partition(".")[0]
            if found.module.startswith("gptlite.torch_private"):  # imported as torch itself
                allowed = name == "torch_private" or "torch" in packages_of(room, found)
            elif top == "gptlite":
                allowed = room_of(found.module) in rooms
            else:
                allowed = top in sys.stdlib_module_names or package_of(found.module) in packages_of(room, found)
            if not allowed:
                refused.append(str(found) + (" at import time" if top in room.lazy.split() else ""))
    assert refused == []


def test_rooms_import_each_other_in_no_cycle():
    """Dataclasses in ROOM/config.py stand for themselves: the configuration takes them, and they import nothing."""
    graph: dict[str, set[str]] = {}
    for name in ROOMS:
        paths = [path for path in files_of(name) if path.name != "config.py"]
        modules = {f.module for path in paths for f in imports_of(path) if not f.lazy}
        found = {room_of(m) for m in modules if re.match(r"gptlite\.(?!(satellites\.)?\w+\.config\.)", m)}
        graph[name] = (found & set(ROOMS)) - {name}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_no_room_imports_one_above_it():
    """Not even inside a function. The configuration takes the dataclasses of rooms below it."""
    layers = {name: layer for layer, name in enumerate(ROOMS)}
    found = [(name, f) for name in ROOMS for path in files_of(name) for f in imports_of(path)]
    rooms = [(name, f, room_of(f.module)) for name, f in found if f.module.startswith("gptlite.")]
    assert len(rooms) > 2000
    assert [str(f) for name, f, other in rooms if layers.get(other, 0) > layers[name]] == []


BASES = ("data.config.DataConfig", "data.config.DatasetConfig")  # which configurations of other rooms extend


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/**/config.py")), ids=lambda path: path.parent.name)
def test_a_config_is_dataclasses_and_nothing_else(path):
    modules = {found.module for found in imports_of(path)}
    others = {m for m in modules if m.partition(".")[0] not in sys.stdlib_module_names}
    assert others <= {f"gptlite.{name}" for name in ("errors.ConfigError", "models.config.ModelConfig", *BASES)}


def test_the_root_configuration_takes_only_config_classes_from_rooms():
    found = [f for f in imports_of(PACKAGE / "config" / "schema.py") if f.module.startswith("gptlite.")]
    folders = [path.parent.relative_to(ROOT) for path in PACKAGE.glob("*/**/__init__.py")]
    rooms = {".".join(folder.parts) + "." for folder in folders}
    taken = [f for f in found if f.module.startswith((*rooms, "gptlite.precision."))]
    assert taken  # else the filter has a hole
    inside = [f for f in taken if not (f.module + ".").startswith(tuple(f"{room}config." for room in rooms))]
    models = ["gptlite.data.registry", "gptlite.models.registry"]
    optimizer = [f"gptlite.optimizer.{each}" for each in ("registry", "schedule_config")]
    others = ["gptlite.optimizer.schedule_config.ScheduleConfig", "gptlite.precision.PrecisionConfig"]
    assert [f.module for f in inside] == [
        "gptlite.config.cluster.ClusterConfig",
        "gptlite.config.plugins.import_included",
        "gptlite.config.trainer.TrainerConfig",
        *models,
        *optimizer,
        *others,
    ]


def test_only_the_composition_knows_the_whole_configuration():
    scripts = [*ROOT.glob("*.py")]  # not __init__.py, which offers `load`
    rooms = [path for name in ROOMS if name not in CONFIG_USERS for path in files_of(name) if path not in COMPOSING]
    found = [f for path in scripts + rooms for f in imports_of(path) if (f.module + ".").startswith("gptlite.config.")]
    assert [str(f) for f in found if not f.module.startswith(("gptlite.config.command_line.", *SECTIONS))] == []


def test_the_core_imports_no_satellite():
    """Not even inside a function: whoever reads a step of training never has to read a satellite."""
    satellites = ("gptlite.satellites.", *(f"gptlite.{name}." for name in set(ROOMS) - CORE))
    found = [f for name in CORE for path in files_of(name) for f in imports_of(path)]
    assert len(found) > 1000
    assert [str(f) for f in found if (f.module + ".").startswith(satellites)] == []
    # The table of commands, which `python -m gptlite` imports, is not read here.
    texts = {path: path.read_text(encoding="utf-8") for name in CORE - {"invocation"} for path in files_of(name)}
    quoted = {(path.name, text) for path in texts for text in re.findall(r'"(gptlite(?:\.\w+)+)"', texts[path])}
    # Imported by their names: the plug-ins that come with gptlite, as a user's are.
    included = (
        "activations compressed corpus deterministic elastic.check images noise nvme "
        "onebit optimizers samples zeropp".split()
    )
    named = {("plugins.py", f"gptlite.satellites.{name}") for name in included}
    assert {each for each in quoted if f"{each[1]}.".startswith(satellites)} == named


# What still knows the GPT: the table of models, and the conversion of its files.
KNOW_THE_GPT = ("models/registry.py", "satellites/huggingface/*.py")


def test_only_its_own_folder_knows_the_gpt():
    """The engine asks any model through its ModelSpec; the list above is to become shorter, never longer."""
    known = {path for pattern in KNOW_THE_GPT for path in PACKAGE.glob(pattern)}
    others = [path for path in PACKAGE.rglob("*.py") if "gpt" not in path.relative_to(PACKAGE).parts]
    found = {str(path.relative_to(PACKAGE)) for path in others for f in imports_of(path) if ".models.gpt" in f.module}
    assert found <= {str(path.relative_to(PACKAGE)) for path in known}
    fields = re.compile(r"\.(num_layers|num_heads|d_model|d_ff|tied_embeddings|padded_vocab_size)\b|token_embedding")
    naming = {path for path in others if fields.search(path.read_text(encoding="utf-8"))}
    assert {str(path.relative_to(PACKAGE)) for path in naming - known} == set()


def test_files_import_each_other_in_no_circle():
    """Not even inside functions."""
    paths = [path for name in ROOMS for path in files_of(name) if path.name != "__init__.py"]
    names = {module_of(path): path for path in paths}
    graph = {}
    for name, path in names.items():
        found = {part for f in imports_of(path) for part in (f.module, f.module.rpartition(".")[0])}
        graph[name] = (found & names.keys()) - {name}
    assert len(list(TopologicalSorter(graph).static_order())) > 300  # raises CycleError


def test_composing_a_configuration_loads_nothing_heavy():
    heavy = ("torch", "numpy", "matplotlib", "sentencepiece")
    code = f"import sys, gptlite.config; print(*(name for name in {heavy} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_pyproject_lists_every_package():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {f"gptlite.{name}": folder.name for name, folder in MAPPED.items()}
    assert setuptools["package-dir"] == folders | {"gptlite.conf": "conf"}  # presets, no Python
    top = {"gptlite": PACKAGE, **{f"gptlite.{name}": folder for name, folder in MAPPED.items()}}
    packages = {name for prefix, folder in top.items() for name in packages_in(prefix, folder, "__init__.py")}
    assert sorted(packages | {"gptlite.conf"}) == setuptools["packages"]
    without_init = {name for prefix, folder in top.items() for name in packages_in(prefix, folder, "*.py")} - packages
    assert without_init == set()


def test_the_reader_sees_every_kind_of_import(tmp_path):
    """Else a hole in it would pass for a clean code base."""
    path = tmp_path / "probe.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nimport numpy as np, torch.nn\nfrom gptlite import ops\nif TYPE_CHECKING:\n"
        "    import wandb\nelse:\n    import attrs\ntry:\n    import yaml\nexcept ImportError:\n    pass\n"
        "class A:\n    import rich\n    def f(self):\n        from hydra import compose\n"
        "import typing\nif typing.TYPE_CHECKING:\n    import jax\n"
    )
    found = {(f.module, f.lazy) for f in imports_of(path)}
    assert found == {
        *((m, False) for m in ("typing.TYPE_CHECKING", "typing", "numpy", "torch.nn", "gptlite.ops", "attrs", "yaml")),
        *((m, True) for m in ("wandb", "hydra.compose", "jax")),
        ("rich", False),
    }


def files_of(name: str) -> list[Path]:
    """The Python files of a room."""
    folder = next((f for f in (MAPPED.get(name), SATELLITES / name) if f and f.is_dir()), PACKAGE / name)
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def room_of(module: str) -> str:
    """The room of a dotted name in gptlite."""
    return module.partition(".")[2].removeprefix("satellites.").partition(".")[0]


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file, whichever way it is written."""
    return tuple(_imports(path, ast.parse(path.read_text(encoding="utf-8")), lazy=False))


def _imports(path: Path, node: ast.AST, lazy: bool) -> Iterator[Import]:
    match node:
        case ast.Import(names=names):
            yield from (Import(path, node.lineno, alias.name, lazy) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=0):
            yield from (Import(path, node.lineno, f"{module}.{alias.name}", lazy) for alias in names)
        case ast.ImportFrom():
            raise AssertionError(f"{path.relative_to(ROOT)}:{node.lineno} imports relatively; write gptlite. ...")
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            lazy = True
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            for child in node.body:
                yield from _imports(path, child, lazy=True)
            for child in node.orelse:
                yield from _imports(path, child, lazy)
            return
    for child in ast.iter_child_nodes(node):
        yield from _imports(path, child, lazy)


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    for name, folder in MAPPED.items():
        if path.is_relative_to(folder):
            return ".".join(["gptlite", name, *path.relative_to(folder).with_suffix("").parts])
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def package_of(module: str) -> str:
    """The package that must be installed for an import: torch's tensorboard writer needs tensorboard."""
    return "tensorboard" if module.startswith("torch.utils.tensorboard") else module.partition(".")[0]


def packages_of(room: Room, found: Import) -> list[str]:
    """The packages that a room may import in this place."""
    return f"{room.packages} {room.lazy if found.lazy else ''}".split()


def packages_in(prefix: str, folder: Path, pattern: str) -> set[str]:
    """Dotted names of the folders under `folder` that hold a file of that name."""
    return {".".join([prefix, *path.parent.relative_to(folder).parts]) for path in folder.rglob(pattern)}
