"""Trace of every op that a training step of the trainer dispatches, on tensors without data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gptlite.kernels.library import Unavailable, load
from gptlite.ops.config import OpsConfig
from gptlite.ops.select import Ops, choose_ops
from gptlite.parallelism.mesh import Mesh
from gptlite.torch_private.dispatch import TorchDispatchMode
from gptlite.torch_private.ops import flash_attention, tree_iter
from gptlite.torch_private.recording import LOCAL_SCALAR, TO_COPY, WITHOUT_COPY, op_name, op_schema

META = torch.device("meta")
ATEN = torch.ops.aten
# Methods that copy a tensor's value to the host, and so wait for everything that was launched before.
READS = tuple(
    getattr(Tensor, name)
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__")
)

# Arguments that our kernels write without reading: AdamW's 16-bit copies of weights, cross entropy's gradient in e5m2.
WRITTEN_ALONE = ("copies", "gradient")
# Reads below this function do not block: their copies were started a step earlier, and on a GPU they have finished by
# then.
ARRIVED = ("trainer/step.py", "_arrived")
MEMORY = (*WITHOUT_COPY, "lift_fresh", "detach", "alias", "set_")  # ops that touch no memory


@dataclass
class Operand:
    """A tensor argument or result of an op."""

    shape: list[int]
    stride: list[int]
    item: int  # bytes of an element
    read: bool = True
    written: bool = False
    host: bool = False  # it is in host memory

    @property
    def touched(self) -> int:
        """Bytes of the tensor that exist in memory: an expanded dim counts as one element."""
        count = self.item
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride or size == 0 else 1
        return count


@dataclass
class Op:
    """One dispatched op. `operands` are its tensor arguments, `results` its results in new memory."""

    name: str  # "aten.mm", "gptlite.layer_norm"
    phase: str  # forward, backward or update
    operands: list[Operand]
    results: list[Operand]
    view: bool  # the results are views of operands, or uninitialized memory
    causal: bool = False

    @property
    def tensors(self) -> list[Operand]:
        """Operands and results."""
        return [*self.operands, *self.results]


@dataclass
class Trace:
    """Ops of a step in order, and the code locations of device-to-host copies with and without waiting."""

    model: str
    micro_batch: int
    tokens: int
    width: int
    head_dim: int
    vocabulary: int
    ops: list[Op] = field(default_factory=list)
    blocking_reads: list[str] = field(default_factory=list)
    copies_to_host: list[str] = field(default_factory=list)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Trace:
        """Return a trace from its `asdict`. Unknown fields, such as another commit's, are ignored."""
        trace = _of(Trace, data)
        trace.ops = [_of(Op, op) for op in data["ops"]]
        for op in trace.ops:
            op.operands, op.results = ([_of(Operand, each) for each in both] for both in (op.operands, op.results))
        return trace


def _of(kind: type[Any], data: Any) -> Any:
    return kind(**{each.name: data[each.name] for each in fields(kind)})


def trace_step(size: str, micro_batch: int, precision: str = "bf16", micro_batches: int = 1) -> Trace:
    """Trace the second step of a model, with the ops of a GPU. Loads the kernels for their shape functions.

    `precision`: as for run_config.
    """
    from real_step import build_step, model_of, run_config

    config = model_of(size)
    step = build_step(run_config(config, precision), Mesh(META), micro_batch, micro_batches, ops=gpu_ops())
    shape = (
        micro_batches * micro_batch * config.sequence_length,
        config.d_model,
        config.head_width,
        config.vocab_size or 0,
    )
    with _Functions(Trace(size, micro_batch, *shape)):
        step()  # untraced, to leave out work that only the first step does
    trace = Trace(size, micro_batch, *shape)
    with _Functions(trace), _Dispatch(trace):
        step()
    return trace


def gpu_ops() -> Ops:
    """Return the ops that a GPU with all kernels uses."""
    loaded = load("cpu", lambda line: print(line, file=sys.stderr))
    if isinstance(loaded, Unavailable):
        raise RuntimeError(f"the trace needs the schemas of the kernels, which are not available: {loaded.reason}")
    return choose_ops(OpsConfig(), torch.device("cuda"), replace(loaded, cuda=True, why_no_cuda=""))


class _Functions(TorchFunctionMode):
    """Function mode that returns 1 where a tensor's value is read, and replaces SDPA with a GPU's flash kernel."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (args and isinstance(args[0], Tensor) and args[0].device.type == "meta"):
            return func(*args, **kwargs)
        if func in READS:
            place = _caller()
            if not any(path == ARRIVED[0] and function == ARRIVED[1] for path, function, _ in _callers()):
                self.trace.blocking_reads.append(f"{func.__name__} at {place}")
            if func is Tensor.tolist:
                return torch.ones(args[0].shape, dtype=args[0].dtype, device="cpu").tolist()
            return {"__bool__": True, "__int__": 1, "__index__": 1}.get(func.__name__, 1.0)
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is None:
            options = kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False)
            return flash_attention(*args[:3], *options, scale=kwargs.get("scale"))
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    """Dispatch mode that records ops and runs them."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (value := _on_host(func, args, kwargs)) is not None:
            waits = not kwargs.get("non_blocking", len(args) > 2 and args[2] is True)
            reads = self.trace.blocking_reads if waits else self.trace.copies_to_host
            reads.append(f"{op_name(func)} at {_caller()}")
            return value
        out = func(*args, **kwargs)
        self.trace.ops.append(_op(func, args, kwargs, out))
        return out


def _op(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Op:
    operands: list[Operand] = []
    causal = False
    for argument, value in _given(op_schema(func), args, kwargs):
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not (written and (argument.kwarg_only or argument.name in WRITTEN_ALONE))  # `out=` is only written
        operands += [_operand(t, read, written) for t in tree_iter(value) if isinstance(t, Tensor)]
        causal |= argument.name == "is_causal" and value
    aliased = [each.alias_info is not None for each in op_schema(func).returns]
    view = bool(aliased) and all(aliased) and not any(operand.written for operand in operands)
    memory = "empty" in op_name(func) or op_name(func) in MEMORY
    new = [] if any(aliased) else [_operand(t, False, True) for t in tree_iter(out) if isinstance(t, Tensor)]
    return Op(f"{func.namespace}.{op_name(func)}", _phase(), operands, new, view or memory, causal)


def _phase() -> str:
    """Return the phase of the current op, found from the functions on the call stack."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.endswith("torch/_tensor.py"):
            return "backward"
        if code.co_name == "run" and "pipeline.py" in code.co_filename:
            return "forward"
        frame = frame.f_back
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


def _on_host(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a stand-in for the data if an op copies it from the device to the host, else None."""
    kinds = [each.device.type for each in args[:2] if isinstance(each, Tensor)]
    if func is LOCAL_SCALAR and kinds[0] == "meta":
        return 1.0
    if func is ATEN.copy_.default and kinds == ["cpu", "meta"]:
        return args[0]
    if func is TO_COPY and kinds[0] == "meta" and str(kwargs.get("device")).startswith("cpu"):
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
    return None


def _callers() -> Iterator[tuple[str, str, int]]:
    """Yield path, function and line of the frames in gptlite, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "gptlite/" in path and "/torch/" not in path:
            yield path.rpartition("gptlite/")[2], frame.f_code.co_name, frame.f_lineno
        frame = frame.f_back


def _caller() -> str:
    """Return the path and line of the innermost frame in gptlite, or an empty string."""
    return next((f"{path}:{line}" for path, _, line in _callers()), "")
