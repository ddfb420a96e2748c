"""Every op that a training step dispatches, on tensors without data: a trace of the trainer's own step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

META = torch.device("meta")
ATEN = torch.ops.aten
# What makes a number on the host of a tensor on the device: the host waits for all that was launched before.
READS = tuple(
    getattr(Tensor, name)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__")
)

# Arguments that a kernel of ours writes without reading them: AdamW's 16-bit copies of weights.
WRITTEN_ALONE = ("copies",)
# Reads of values that were copied without a wait a step before: a GPU's have arrived.
ARRIVED = "parallelism/host_copy.py"


@dataclass
class Operand:
    """A tensor as an op sees it."""

    shape: list[int]
    stride: list[int]
    item: int  # bytes of an element
    read: bool = True
    written: bool = False
    host: bool = False  # it is in host memory

    @property
    def touched(self) -> int:
        """Bytes of it that exist: an expanded dim is one element."""
        count = self.item
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride or size == 0 else 1
        return count


@dataclass
class Op:
    """One dispatched op: `operands` are those given, `results` those that are new memory."""

    name: str  # "aten.mm", "gptlite.layer_norm"
    phase: str  # forward, backward or update
    operands: list[Operand]
    results: list[Operand]
    view: bool  # results are views of operands, or memory nobody has written
    causal: bool = False
    where: str = ""  # file and line in the project that called it; of the backward pass nothing


@dataclass
class Trace:
    """A step: its ops in order, and where the host waited for the device, or copied from it without waiting."""

    model: str
    micro_batch: int
    tokens: int
    layers: int
    width: int
    head_dim: int
    vocabulary: int
    parameters: int
    ops: list[Op] = field(default_factory=list)
    blocking_reads: list[str] = field(default_factory=list)
    copies_to_host: list[str] = field(default_factory=list)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Trace:
        """What `asdict` made of one."""
        ops = [
            Op(**{**op, "operands": _operands(op["operands"]), "results": _operands(op["results"])})
            for op in data["ops"]
        ]
        return Trace(**{**data, "ops": ops})


def _operands(rows: list[dict[str, Any]]) -> list[Operand]:
    return [Operand(**row) for row in rows]


def trace_step(size: str, micro_batch: int) -> Trace:
    """Traces the second step of a model, bf16, with the ops that a GPU takes. Loads the kernels for their shapes."""
    from gptlite.models.gpt.flops import num_parameters
    from gptlite.precision import Policy, Precision

    from .real_step import build_step, model_of

    config = model_of(size)
    policy = Policy(torch.bfloat16, "traced", Precision.bf16)
    with _as_on_a_gpu():
        taken = build_step(config, gpu_ops(), policy, META, micro_batch, drawn=False)
        shape = (config.num_layers, config.d_model, config.head_dim, config.vocab_size or 0, num_parameters(config))
        trace = Trace(size, micro_batch, taken.tokens, *shape)
        with _Functions(Trace(size, micro_batch, taken.tokens, *shape)):
            taken.step()  # what only the first one does is left out
        with _Functions(trace), _Dispatch(trace):
            taken.step()
    return trace


def gpu_ops() -> Any:
    """The ops that a GPU with all kernels takes."""
    from gptlite.kernels.library import Loaded, Unavailable, load
    from gptlite.ops import select
    from gptlite.ops.config import OpsConfig

    loaded = load("cpu", lambda line: print(line, file=sys.stderr))
    if isinstance(loaded, Unavailable):
        raise RuntimeError(f"the trace needs the kernels' schemas: {loaded.reason}")
    there = Loaded(loaded.path, True, loaded.isa, loaded.seconds, loaded.cached, "")
    if hasattr(select, "choose_ops"):
        return select.choose_ops(OpsConfig(), torch.device("cuda"), there)
    select.load = lambda *_: there  # an older tree asks for the library itself
    return select.select_ops(OpsConfig(), torch.device("cuda"))


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Sets what ops decide by the kind of device as for a GPU, where they do not know of traces."""
    from gptlite.ops import config

    limits: list[dict[str, Any]] = [config.LOGIT_BYTES, config.SOFTMAX_BYTES]
    added = [limit for limit in limits if "meta" not in limit]
    for limit in added:
        limit["meta"] = limit["cuda"]
    try:
        yield
    finally:
        for limit in added:
            del limit["meta"]


class _Functions(TorchFunctionMode):
    """Answers what a tensor without data cannot: numbers on the host. SDPA becomes its flash kernel, as on a GPU."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS and isinstance(args[0], Tensor) and args[0].device.type == "meta":
            place = _caller()
            arrived = place.startswith(ARRIVED)
            (self.trace.copies_to_host if arrived else self.trace.blocking_reads).append(f"{func.__name__} at {place}")
            return _ones(args[0], func.__name__)
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is None and args[0].device.type == "meta":
            options = {"scale": kwargs.get("scale")}
            return ATEN._scaled_dot_product_flash_attention(
                *args[:3], kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False), **options
            )[0]
        return func(*args, **kwargs)


def _ones(tensor: Tensor, name: str) -> Any:
    """A finite value in place of what cannot be read."""
    if name == "tolist":
        return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu").tolist()
    return {"__bool__": True, "__int__": 1, "__index__": 1}.get(name, 1.0)


class _Dispatch(TorchDispatchMode):
    """Writes down what is dispatched, and runs it."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name := _to_host(func, args, kwargs):
            waits = not kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
            (self.trace.blocking_reads if waits else self.trace.copies_to_host).append(f"{name} at {_caller()}")
            return _on_host(func, args, kwargs)
        out = func(*args, **kwargs)
        self.trace.ops.append(self._op(func, args, kwargs, out))
        return out

    def _op(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Op:
        schema = func._schema
        operands: list[Operand] = []
        for argument, value in _given(schema, args, kwargs):
            written = argument.alias_info is not None and argument.alias_info.is_write
            read = not (written and (argument.kwarg_only or argument.name in WRITTEN_ALONE))  # `out=` is not
            operands += [_operand(t, read, written) for t in tree_iter(value) if isinstance(t, Tensor)]
        aliased = [each.alias_info is not None for each in schema.returns]
        view = bool(aliased) and all(aliased) and not any(operand.written for operand in operands)
        new = [] if any(aliased) else [_operand(t, False, True) for t in tree_iter(out) if isinstance(t, Tensor)]
        name = f"{func.namespace}.{func._opname}"
        causal = any(argument.name == "is_causal" and value for argument, value in _given(schema, args, kwargs))
        return Op(name, self._phase(name), operands, new, view or _memory_alone(name), causal, _caller())

    def _phase(self, name: str) -> str:
        frames = sys._getframe(2)
        while frames is not None:
            code = frames.f_code
            if code.co_name == "backward" and code.co_filename.endswith("torch/_tensor.py"):
                return "backward"
            if code.co_name == "run" and "pipeline.py" in code.co_filename:
                return "forward"
            frames = frames.f_back
        return "update"


def _given(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for index, argument in enumerate(schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _operand(tensor: Tensor, read: bool, written: bool) -> Operand:
    host = tensor.device.type != "meta"
    return Operand(list(tensor.shape), list(tensor.stride()), tensor.element_size(), read, written, host)


def _memory_alone(name: str) -> bool:
    """Whether an op only allocates or describes memory."""
    op = name.partition(".")[2]
    return "empty" in op or op in ("_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias", "set_")


def _to_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The op's name where it brings data from the device to the host."""
    if func is ATEN._local_scalar_dense.default and args[0].device.type == "meta":
        return "_local_scalar_dense"
    if func is ATEN._to_copy.default and args[0].device.type == "meta":
        there = kwargs.get("device")
        return "_to_copy" if there is not None and torch.device(there).type == "cpu" else ""
    if func is ATEN.copy_.default and args[0].device.type == "cpu" and args[1].device.type == "meta":
        return "copy_"
    return ""


def _on_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func is ATEN._local_scalar_dense.default:
        return 1.0
    if func is ATEN.copy_.default:
        return args[0]
    return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")


def _caller() -> str:
    """The innermost frame of the project's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "gptlite/" in path and "/torch/" not in path:
            return f"{path.rpartition('gptlite/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
