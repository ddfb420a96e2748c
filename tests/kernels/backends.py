"""The backends that every kernel test runs on: one method per op, from tensors to tensors.

`Backend` calls a library through the C header, each tensor between guards (memory.py). tests/gpu has one of the same
methods for torch.ops.
"""

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.library import (
    CODES,
    GptliteAdam,
    GptliteDropout,
    GptliteHeads,
    Threads,
    signatures,
)
from kernels.memory import Buffer, Memory, argument
from kernels.options import Adam, Dropout, Loss, State

UNSUPPORTED = 10001


@dataclass(frozen=True)
class Backend:
    """The kernels of a library whose functions start with `prefix`."""

    name: str
    library: ctypes.CDLL
    prefix: str
    isa: str | None = None  # the most that a CPU library uses; None: its best
    threads: Threads | None = None
    offsets: tuple[int, ...] = (0,)  # of the buffers in turn, in elements

    widest: ClassVar[int] = 1 << 62  # elements that a test may give it in one tensor

    def having(self, **changes: object) -> "Backend":
        return dataclasses.replace(self, **changes)

    @property
    def is_cpu(self) -> bool:
        return self.prefix == "gptlite_cpu_"

    @property
    def is_emulated(self) -> bool:
        """Whether it takes seconds where others take milliseconds."""
        return not self.is_cpu

    def masked_softmax_forward(self, x: Tensor, mask: Tensor | None, scale: float, in_place: bool = False) -> Tensor:
        """`mask` broadcasts to x [batch, heads, queries, keys], and keeps the order of its strides."""
        memory = self._memory()
        data = memory.copy(x, written=in_place)
        y = data if in_place else memory.new(x.shape, x.dtype)
        mask_arguments = None, CODES[None], None
        if mask is not None:
            mask_data, view = _permuted(memory, mask)
            strides = (ctypes.c_int64 * 4)(*view.expand(x.shape).stride())
            mask_arguments = mask_data, CODES[mask.dtype], strides
        self._call(memory, "masked_softmax_forward", y, data, *mask_arguments, *x.shape, scale, CODES[x.dtype])
        return y.tensor

    def masked_softmax_backward(self, dy: Tensor, y: Tensor, scale: float, in_place: bool = False) -> Tensor:
        memory = self._memory()
        dy_data, y_data = memory.copy(dy, written=in_place), memory.copy(y)
        dx = dy_data if in_place else memory.new(dy.shape, dy.dtype)
        self._call(memory, "masked_softmax_backward", dx, dy_data, y_data, *dy.shape, scale, CODES[dy.dtype])
        return dx.tensor

    def causal_softmax_forward(self, x: Tensor, scale: float, in_place: bool = False) -> Tensor:
        memory = self._memory()
        data = memory.copy(x, written=in_place)
        y = data if in_place else memory.new(x.shape, x.dtype)
        self._call(memory, "causal_softmax_forward", y, data, *x.shape, scale, CODES[x.dtype])
        return y.tensor

    def causal_softmax_backward(self, dy: Tensor, y: Tensor, scale: float) -> Tensor:
        memory = self._memory()
        dx, dy_data, y_data = memory.new(dy.shape, dy.dtype), memory.copy(dy), memory.copy(y)
        self._call(memory, "causal_softmax_backward", dx, dy_data, y_data, *dy.shape, scale, CODES[dy.dtype])
        return dx.tensor

    def layer_norm_forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y, mean, rstd."""
        memory, rows = self._memory(), x.shape[0]
        y, mean, rstd = (
            memory.new(x.shape, x.dtype),
            memory.new([rows], torch.float32),
            memory.new([rows], torch.float32),
        )
        inputs = memory.copy(x), memory.copy(weight), memory.optional(bias)
        self._call(
            memory, "layer_norm_forward", y, mean, rstd, *inputs, *x.shape, eps, CODES[x.dtype], CODES[weight.dtype]
        )
        return y.tensor, mean.tensor, rstd.tensor

    def layer_norm_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, want_bias: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """dx, dweight, dbias."""
        memory = self._memory()
        dx, dweight = memory.new(x.shape, x.dtype), memory.new(weight.shape, weight.dtype)
        dbias = memory.new(weight.shape, weight.dtype) if want_bias else None
        workspace = self._rows_workspace(memory, *x.shape)
        inputs = [memory.copy(each) for each in (dy, x, weight, mean, rstd)]
        codes = CODES[x.dtype], CODES[weight.dtype]
        self._call(memory, "layer_norm_backward", dx, dweight, dbias, workspace, *inputs, *x.shape, *codes)
        return dx.tensor, dweight.tensor, _tensor(dbias)

    def residual_norm_forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        beta: Tensor | None,
        eps: float,
        dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, h, mean, rstd of x [batch, positions, width]."""
        memory, rows = self._memory(), x.shape[0] * x.shape[1]
        y, h = memory.new(x.shape, x.dtype), memory.new(x.shape, x.dtype)
        mean, rstd = memory.new([rows], torch.float32), memory.new([rows], torch.float32)
        inputs = [memory.optional(each) for each in (x, bias, residual, weight, beta)]
        options = self._dropout(memory, dropout), CODES[x.dtype], CODES[weight.dtype]
        self._call(memory, "residual_norm_forward", y, h, mean, rstd, *inputs, *x.shape, eps, *options)
        return y.tensor, h.tensor, mean.tensor, rstd.tensor

    def residual_norm_backward(
        self,
        dy: Tensor,
        dh: Tensor | None,
        h: Tensor,
        weight: Tensor,
        mean: Tensor,
        rstd: Tensor,
        dropout: Dropout | None,
        want_bias: bool = True,
        want_beta: bool = True,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor, Tensor | None]:
        """dx (None without dropout), dresidual, dbias, dweight, dbeta."""
        memory = self._memory()
        dx = None if dropout is None else memory.new(h.shape, h.dtype)
        dresidual = memory.new(h.shape, h.dtype)
        dbias = memory.new(weight.shape, weight.dtype) if want_bias else None
        dweight = memory.new(weight.shape, weight.dtype)
        dbeta = memory.new(weight.shape, weight.dtype) if want_beta else None
        workspace = self._rows_workspace(memory, h.shape[0] * h.shape[1], h.shape[2])
        inputs = [memory.optional(each) for each in (dy, dh, h, weight, mean, rstd)]
        options = self._dropout(memory, dropout), CODES[h.dtype], CODES[weight.dtype]
        outputs = dx, dresidual, dbias, dweight, dbeta
        self._call(memory, "residual_norm_backward", *outputs, workspace, *inputs, *h.shape, *options)
        return _tensor(dx), dresidual.tensor, _tensor(dbias), dweight.tensor, _tensor(dbeta)

    def bias_gelu_forward(self, x: Tensor, bias: Tensor | None, approximate: bool) -> Tensor:
        memory = self._memory()
        y, data, bias_data = memory.new(x.shape, x.dtype), memory.copy(x), memory.optional(bias)
        self._call(memory, "bias_gelu_forward", y, data, bias_data, *x.shape, approximate, CODES[x.dtype])
        return y.tensor

    def bias_gelu_backward(
        self, dy: Tensor, x: Tensor, bias: Tensor | None, approximate: bool
    ) -> tuple[Tensor, Tensor | None]:
        """dx, and dbias where there is a bias."""
        memory = self._memory()
        dx = memory.new(x.shape, x.dtype)
        dbias = None if bias is None else memory.new(bias.shape, bias.dtype)
        workspace = self._rows_workspace(memory, *x.shape)
        inputs = memory.copy(dy), memory.copy(x), memory.optional(bias)
        self._call(memory, "bias_gelu_backward", dx, dbias, workspace, *inputs, *x.shape, approximate, CODES[x.dtype])
        return dx.tensor, _tensor(dbias)

    def dropout(self, x: Tensor, dropout: Dropout, in_place: bool = False) -> Tensor:
        """x [batch, heads, positions, width]."""
        memory = self._memory()
        data = memory.copy(x, written=in_place)
        y = data if in_place else memory.new(x.shape, x.dtype)
        self._call(memory, "dropout", y, data, *x.shape, self._dropout(memory, dropout), CODES[x.dtype])
        return y.tensor

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, loss: Loss, want_gradient: bool = True, padding: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Losses, and what the logits became; in memory each row is followed by `padding` elements to leave alone."""
        memory, (rows, columns) = self._memory(), logits.shape
        losses, data = memory.new([rows], torch.float32), self._padded(memory, logits, padding, want_gradient)
        arguments = losses, data, columns + padding, memory.copy(targets), rows, columns, loss.struct(columns)
        self._call(memory, "cross_entropy", *arguments, want_gradient, CODES[logits.dtype])
        return losses.tensor, _unpadded(data, columns)

    def cross_entropy_stats(self, logits: Tensor, targets: Tensor, loss: Loss, padding: int = 0) -> Tensor:
        memory, (rows, columns) = self._memory(), logits.shape
        stats, data = memory.new([rows, 3], torch.float32), self._padded(memory, logits, padding, False)
        arguments = stats, data, columns + padding, memory.copy(targets), rows, columns, loss.struct(columns)
        self._call(memory, "cross_entropy_stats", *arguments, CODES[logits.dtype])
        return stats.tensor

    def cross_entropy_gradient(
        self, logits: Tensor, targets: Tensor, log_sum: Tensor, loss: Loss, padding: int = 0
    ) -> Tensor:
        memory, (rows, columns) = self._memory(), logits.shape
        data = self._padded(memory, logits, padding, True)
        arguments = data, columns + padding, memory.copy(targets), memory.copy(log_sum)
        self._call(
            memory, "cross_entropy_gradient", *arguments, rows, columns, loss.struct(columns), CODES[logits.dtype]
        )
        return _unpadded(data, columns)

    def norm(self, tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        memory, count = self._memory(), len(tensors)
        out, data = memory.new([1], torch.float32), [memory.copy(each) for each in tensors]
        size = self.library.gptlite_norm_workspace(sum(each.numel() for each in tensors), count)
        pointers = (ctypes.c_void_p * count)(*(each.pointer for each in data))
        counts = (ctypes.c_int64 * count)(*(each.numel() for each in tensors))
        workspace = memory.new([size], torch.float32)
        self._call(memory, "norm", out, workspace, pointers, counts, count, CODES[dtype])
        return out.tensor[0]

    def adamw(
        self,
        states: Sequence[State],
        gradients: Sequence[Tensor],
        options: Adam,
        scale: float | None = None,
        found_inf: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> list[State]:
        """The states after one step."""
        memory, structs, after = self._memory(), (GptliteAdam * len(states))(), []
        for i, (state, gradient) in enumerate(zip(states, gradients, strict=True)):
            parts = state.parameter, state.exp_avg, state.exp_avg_sq, state.step
            parameter, exp_avg, exp_avg_sq, step = (memory.copy(each, written=True) for each in parts)
            pointers = parameter, memory.copy(gradient), exp_avg, exp_avg_sq, step
            copy = None if state.copy is None else memory.copy(state.copy, written=True)
            held = (None, CODES[torch.bfloat16]) if copy is None else (copy.pointer, CODES[copy.tensor.dtype])
            structs[i] = GptliteAdam(*(each.pointer for each in pointers), gradient.numel(), *held)
            copied = None if copy is None else copy.tensor
            after.append(State(parameter.tensor, exp_avg.tensor, exp_avg_sq.tensor, step.tensor, copied))
        o = options
        numbers = [None if each is None else memory.copy(torch.tensor([each])) for each in (scale, found_inf)]
        rates = o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.adam
        self._call(memory, "adamw", structs, len(states), *rates, *numbers, CODES[dtype])
        return after

    def attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, layout: str = "bshd"
    ) -> tuple[Tensor, Tensor]:
        """out [batch, heads, queries, width], lse [batch, heads, queries]."""
        memory, (batch, heads, queries, width) = self._memory(), q.shape
        inputs = _heads(memory, [q, k, v], layout)
        (out,) = _heads(memory, [torch.empty_like(q)], layout, written=True)
        lse = memory.new(q.shape[:3], torch.float32)
        sizes = batch, heads, queries, k.shape[2], width
        heads = [_heads_struct(each) for each in (out, *inputs)]
        self._call(memory, "gptlite_cpu_attention_forward", heads[0], lse, *heads[1:], *sizes, scale, CODES[q.dtype])
        return out, lse.tensor

    def attention_backward(
        self,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        layout: str = "bshd",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        memory, (batch, heads, queries, width) = self._memory(), q.shape
        inputs = _heads(memory, [q, k, v], layout)
        gradients = _heads(memory, [torch.empty_like(each) for each in (q, k, v)], layout, written=True)
        outs = [_heads(memory, [each], layout)[0] for each in (dout, out)]
        structs = [_heads_struct(each) for each in (*gradients, *outs)], [_heads_struct(each) for each in inputs]
        sizes = batch, heads, queries, k.shape[2], width
        self._call(
            memory,
            "gptlite_cpu_attention_backward",
            *structs[0],
            memory.copy(lse),
            *structs[1],
            *sizes,
            scale,
            CODES[q.dtype],
        )
        return tuple(gradients)

    def weight_gradient(
        self, dy: Tensor, x: Tensor, out_dtype: torch.dtype = torch.float32, threads: int = 1
    ) -> tuple[Tensor, Tensor]:
        """dw [outputs, inputs], dbias [outputs] of dy [rows, outputs] and x [rows, inputs]."""
        memory, (rows, outputs), inputs = self._memory(), dy.shape, x.shape[1]
        dw, dbias = memory.new((outputs, inputs), out_dtype), memory.new((outputs,), out_dtype)
        sizes = rows, outputs, inputs, CODES[dy.dtype], CODES[out_dtype], threads
        self._call(memory, "gptlite_cpu_weight_gradient", dw, dbias, memory.copy(dy), memory.copy(x), *sizes)
        return dw.tensor, dbias.tensor

    def _memory(self) -> Memory:
        return Memory(self.offsets)

    def _rows_workspace(self, memory: Memory, rows: int, width: int) -> Buffer:
        return memory.new([self.library.gptlite_rows_workspace(rows, width)], torch.float32)

    def _dropout(self, memory: Memory, dropout: Dropout | None) -> GptliteDropout | None:
        if dropout is None:
            return None
        site = memory.copy(torch.tensor([dropout.site]))
        ids = memory.copy(torch.tensor(dropout.sample_ids, dtype=torch.int64))
        places = site.pointer, ids.pointer, dropout.first_position, dropout.first_head
        return GptliteDropout(dropout.seed, int(dropout.p * 2**32), dropout.scale, *places)

    def _padded(self, memory: Memory, logits: Tensor, padding: int, written: bool) -> Buffer:
        rows, columns = logits.shape
        data = memory.new([rows, columns + padding], logits.dtype)
        data.tensor[:, :columns] = logits
        data.written = written
        return data

    def _call(self, memory: Memory, op: str, *arguments: object) -> None:
        function = getattr(self.library, op if op.startswith("gptlite_") else self.prefix + op)
        function.argtypes = [*signatures()[op], ctypes.c_void_p]
        assert len(arguments) == len(signatures()[op]), f"{op} takes {len(signatures()[op])} arguments"
        memory.remember()
        context = None if self.threads is None else ctypes.byref(self.threads.struct)
        status = self._run(function, [*map(argument, arguments), context], memory)
        assert status == 0, f"{op} returned {status}"
        memory.check()

    def _run(self, function: ctypes._CFuncPtr, arguments: list, memory: Memory) -> int:
        if self.is_cpu:
            self.library.gptlite_cpu_limit_isa(None if self.isa is None else self.isa.encode())
        return function(*arguments)


def _tensor(buffer: Buffer | None) -> Tensor | None:
    return None if buffer is None else buffer.tensor


def _permuted(memory: Memory, tensor: Tensor) -> tuple[Buffer, Tensor]:
    """A copy whose dims lie in memory in the tensor's order, and the view of it that equals the tensor."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    buffer = memory.copy(tensor.permute(order))
    return buffer, buffer.tensor.permute([order.index(dim) for dim in range(tensor.dim())])


def _unpadded(data: Buffer, columns: int) -> Tensor:
    """The rows without their padding, which still is as it was."""
    padding = data.tensor[:, columns:].contiguous().view(torch.uint8)
    assert (padding == 0xFF).all(), "written past a row's columns"
    return data.tensor[:, :columns]


def _heads(memory: Memory, tensors: list[Tensor], layout: str, written: bool = False) -> list[Tensor]:
    """The tensors [batch, heads, positions, width] in memory as `layout` has them, `packed`: as parts of one tensor."""
    match layout:
        case "bhsd":
            places = [memory.new(each.shape, each.dtype) for each in tensors]
            views = [each.tensor for each in places]
        case "bshd":
            places = [memory.new(each.transpose(1, 2).shape, each.dtype) for each in tensors]
            views = [each.tensor.transpose(1, 2) for each in places]
        case "packed":
            batch, heads, positions, width = tensors[0].shape
            places = [memory.new([batch, positions, len(tensors), heads, width], tensors[0].dtype)]
            views = [each.transpose(1, 2) for each in places[0].tensor.unbind(2)]
    for place in places:
        place.written = written
    if not written:
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
    return views


def _heads_struct(tensor: Tensor) -> GptliteHeads:
    return GptliteHeads(tensor.data_ptr(), *tensor.stride()[:3])
