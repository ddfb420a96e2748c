"""What ranks do in test_checkpoint_ranks.py. Every function runs on all ranks; what it returns is compared there."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint.conftest import FakeTokenizer, bits, failing_at
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh, build_mesh

# Name, shape, and the dim that the tensor axis cuts. Odd sizes, and fewer rows than ranks.
LAYERS = {"up.weight": ((12, 5), 0), "up.bias": ((12,), 0), "down.weight": ((5, 12), 1), "norm.weight": ((5,), None)}
LAYERS |= {"tiny.weight": ((1, 3), None)}
EMBEDDING = "token_embedding.weight"

LAYOUTS = {
    "fsdp2_tp2": {"zero": 3, "data": 2, "tensor": 2},
    "hsdp": {"zero": 2, "data": 4, "dp_replicate": 2},
    "fsdp4": {"zero": 1, "data": 4},
    "ddp4": {"data": 4},
    "tp4": {"tensor": 4},
    "pp2_fsdp2": {"pipeline": 2, "zero": 3, "data": 2},
    "pp2_tp2": {"pipeline": 2, "tensor": 2},
    "pp4": {"pipeline": 4},
}


class Unknown(OSError):
    """An exception that does not come through a pickle."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


def whole_tensors() -> dict[str, Tensor]:
    """The whole of every tensor of a model and its optimizer's state, by global name."""
    shapes = {EMBEDDING: (9, 5)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(4) for name, (shape, _) in LAYERS.items()}
    tensors: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        tensors[f"model.{name}"] = weight
        tensors[f"optim.{name}.step"] = torch.tensor(100.0 + number)
        tensors[f"optim.{name}.exp_avg"] = weight / 3
        tensors[f"optim.{name}.exp_avg_sq"] = weight * weight
    return tensors


def cut_tensors(mesh: Mesh, config: ParallelismConfig) -> dict[str, Tensor]:
    """This rank's part of `whole_tensors`, cut as a model is: plain tensors, or FSDP2's DTensors."""
    whole, stage = whole_tensors(), mesh.coordinate("pp")
    per_stage = 4 // mesh.size("pp")
    names = [f"layers.{i}.{name}" for i in range(stage * per_stage, (stage + 1) * per_stage) for name in LAYERS]
    if stage in (0, mesh.size("pp") - 1):
        names.append(EMBEDDING)
    part = nn.Module()
    for name in names:
        weight, dim = whole[f"model.{name}"].clone(), 0 if name == EMBEDDING else LAYERS[name.split(".", 2)[2]][1]
        if mesh.size("tp") > 1 and dim is not None:
            weight = distribute_tensor(weight, mesh.along("tp"), [Shard(dim)], src_data_rank=None)
        part.register_parameter(name.replace(".", "/"), nn.Parameter(weight))
    if mesh.fsdp_size > 1:
        hybrid = config.zero == 0 or mesh.size("dp_replicate") > 1
        fully_shard(part, mesh=mesh.along(*(("dp_replicate", "dp_shard") if hybrid else ("dp_shard",))))
    tensors: dict[str, Tensor] = {}
    for name, parameter in part.named_parameters():
        name, weight = name.replace("/", "."), parameter.detach()
        tensors[f"model.{name}"] = weight
        tensors[f"optim.{name}.step"] = whole[f"optim.{name}.step"]
        tensors[f"optim.{name}.exp_avg"] = weight / 3
        tensors[f"optim.{name}.exp_avg_sq"] = weight * weight
    return tensors


class Case:
    """A layout, its tensors and a checkpointer; a context that gives all of it back. `beside`: asynchronous saves."""

    def __init__(self, run: Path, layout: str, beside: bool = False) -> None:
        self.config = ParallelismConfig(**LAYOUTS[layout])
        self.mesh = build_mesh(self.config)
        self.tensors = cut_tensors(self.mesh, self.config)
        self.checkpointer = Checkpointer(CheckpointConfig(keep=0, async_save=beside), run, self.mesh, layout)

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self.checkpointer.close()
        self.mesh.close()

    def save(self, step: int, **options: Any) -> Path:
        arguments = {"tensors": self.tensors, "meta": {"step": step}, "tokenizer": FakeTokenizer()} | options
        folder = self.checkpointer.save(config_yaml="seed: 1\n", log=print, **arguments)
        if self.checkpointer.config.async_save and arguments["tensors"] is self.tensors:
            for tensor in self.tensors.values():  # as training would
                local_tensor(tensor).detach().mul_(-1)
            self.checkpointer.finish()
            for tensor in self.tensors.values():
                local_tensor(tensor).detach().mul_(-1)
        self.checkpointer.finish()
        return folder


def save_and_read_back(run: Path, layout: str, beside: bool = False) -> tuple[Path, list[str]]:
    """The folder, and the keys that did not come back bit for bit and in place."""
    with Case(run, layout, beside) as case:
        folder = case.save(100)
        into = {key: torch.zeros_like(tensor) for key, tensor in case.tensors.items()}
        addresses = {key: local_tensor(tensor).data_ptr() for key, tensor in into.items()}
        load_tensors(folder, into, mesh=case.mesh)
        wrong = [key for key in into if bits(local_tensor(into[key])) != bits(local_tensor(case.tensors[key]))]
        return folder, wrong + [key for key in into if local_tensor(into[key]).data_ptr() != addresses[key]]


def fails(action: Callable[[], Any]) -> str:
    """What an action raises, and its message; the notes on where are another rank's."""
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fail_to_save(run: Path, layout: str, beside: bool = False) -> dict[str, str]:
    """What each way of failing raises here."""
    raised: dict[str, str] = {}
    with Case(run, layout, beside) as case:
        rank, case_tensors = case.mesh.rank, case.tensors
        case.save(100)
        for name, where, error in (
            ("disk full", 2, OSError(errno.ENOSPC, "No space left on device")),
            ("disk full on rank 0", 0, OSError(errno.ENOSPC, "No space left on device")),
            ("interrupted", 1, KeyboardInterrupt()),
            ("unknown error", 3, Unknown(1, 2)),
        ):
            with failing_at(torch, "save", 2 if rank == where else None, error):
                raised[name] = fails(lambda: case.save(200))
        for name, call in (("fsync of its tensors", 0), ("fsync of the manifest", 4), ("fsync of the folder", 6)):
            error = OSError(errno.EIO, "Input/output error")
            with failing_at(os, "fsync", call if rank == 0 else None, error):
                raised[name] = fails(lambda: case.save(200))
        broken = FakeTokenizer(RuntimeError("no vocabulary"))
        raised["tokenizer"] = fails(lambda: case.save(200, tokenizer=broken if rank == 0 else FakeTokenizer()))
        raised["meta"] = fails(lambda: case.save(200, meta={"step": 200, "bad": {1} if rank == 0 else 1}))
        extra = {"lr": 0.1} if rank == 3 else {}
        raised["no tensor"] = fails(lambda: case.save(200, tensors=case_tensors | extra))
        other = {"model.layers.0.up.weight": torch.zeros(11, 5)} if rank == 3 else {}
        raised["two shapes"] = fails(lambda: case.save(200, tensors=case_tensors | other))
        case.checkpointer.root = run / "file" / "checkpoints"
        raised["unwritable"] = fails(lambda: case.save(200))
    return raised


def fail_to_load(run: Path, layout: str) -> dict[str, str]:
    """What each way of failing raises here, and whether a tensor was touched."""
    raised: dict[str, str] = {}
    with Case(run, layout) as case:
        folder, rank = case.save(300), case.mesh.rank
        threes = {key: torch.full_like(tensor, 3.0) for key, tensor in case.tensors.items()}

        def load(into: dict[str, Tensor], **options: Any) -> None:
            load_tensors(folder, into, mesh=case.mesh, **options)

        raised["missing there"] = fails(lambda: load(threes | ({"more": torch.zeros(2)} if rank == 3 else {})))
        less = {key: tensor for key, tensor in threes.items() if "layers.3.up.bias" not in key}
        raised["missing here"] = fails(lambda: load(less))
        raised["not strict"] = fails(lambda: load({key: torch.zeros_like(t) for key, t in less.items()}, strict=False))
        other = {"model.layers.0.up.bias": torch.zeros(7)} if rank == 1 else {}
        raised["another shape"] = fails(lambda: load(threes | other))
        (payload, *_) = sorted((folder / "data").glob("*.distcp"), reverse=True)
        content = payload.read_bytes()
        gather_objects(case.mesh, None)  # all have read it
        if rank == 0:
            payload.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        raised["damaged"] = fails(lambda: load(threes))
        raised["touched"] = str([key for key, t in threes.items() if not bool((local_tensor(t).detach() == 3).all())])
        raised["damaged since it was verified"] = fails(lambda: load(threes, verified=True))
    return raised


def die_in_save(run: Path, layout: str, victim: int) -> None:
    """One rank is killed when it has written some of its tensors; the others tell in a file what they saw."""
    with Case(run, layout) as case:
        case.save(400)
        if case.mesh.rank == victim:
            count, original = iter(range(10**9)), torch.save

            def save(*args: Any, **kwargs: Any) -> None:
                if next(count) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                original(*args, **kwargs)

            torch.save = save
        raised = fails(lambda: case.save(500))
        (run / f"rank-{case.mesh.rank}").write_text(raised)
        raise RuntimeError(raised)
