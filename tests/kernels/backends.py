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

from gptlite.cpu import level_limit
from gptlite.kernels.activation import ACTIVATIONS, is_gated
from kernels.library import CODES, GptliteAdam, GptliteDropout, GptliteHeads, Threads, signatures
from kernels.memory import Buffer, Memory, argument
from kernels.options import Adam, Dropout, Loss, State

UNSUPPORTED = 10001
NO_WINDOW = 2**62  # a number of keys that no query has
Made = tuple[Sequence[int], torch.dtype]  # an output
Pair = tuple[Tensor | None, Tensor | None]


def limit_isa(library: ctypes.CDLL, isa: str | None) -> bool:
    """Limit a CPU library to an instruction set, of LEVELS; None: to what it is limited to in training. Return whether
    the CPU has it."""
    if library.gptlite_cpu_limit_isa((isa or level_limit()).encode()) != UNSUPPORTED:
        return True
    library.gptlite_cpu_limit_isa(None)
    return isa is None


def units_of(x: Tensor, kind: str) -> tuple[int, int]:
    """The size of an activation's result of x [rows, columns]."""
    return x.shape[0], x.shape[1] // 2 if is_gated(ACTIVATIONS[kind]) else x.shape[1]


@dataclass(frozen=True)
class Backend:
    """The kernels of a library whose functions start with `prefix`."""

    name: str
    library: ctypes.CDLL
    prefix: str
    isa: str | None = None  # the most that a CPU library uses; None: what it uses in training
    threads: Threads | None = None
    offsets: tuple[int, ...] = (0,)  # of the buffers in turn, in elements

    widest: ClassVar[int] = 1 << 62  # elements that a test may give it in one tensor

    def having(self, **changes: object) -> "Backend":
        return dataclasses.replace(self, **changes)

    def of_case(self, name: str) -> "Backend":
        """The backend for one of the cases that a test loops over."""
        return self

    @property
    def is_cpu(self) -> bool:
        return self.prefix == "gptlite_cpu_"

    @property
    def is_emulated(self) -> bool:
        """Whether it takes seconds where others take milliseconds."""
        return not self.is_cpu

    def masked_softmax_forward(self, x: Tensor, mask: Tensor | None, scale: float, in_place: bool = False) -> Tensor:
        """`mask` broadcasts to x [batch, heads, queries, keys], and keeps the order of its strides."""
        memory, arguments = self._memory(), (None, CODES[None], None)
        if mask is not None:
            data, view = _permuted(memory, mask)
            arguments = data, CODES[mask.dtype], (ctypes.c_int64 * 4)(*view.expand(x.shape).stride())
        return self._rewritten("masked_softmax_forward", x, (*arguments, *x.shape, scale), in_place, memory)

    def masked_softmax_backward(self, dy: Tensor, y: Tensor, scale: float, in_place: bool = False) -> Tensor:
        memory = self._memory()
        return self._rewritten("masked_softmax_backward", dy, (memory.copy(y), *dy.shape, scale), in_place, memory)

    def causal_softmax_forward(self, x: Tensor, scale: float, in_place: bool = False) -> Tensor:
        return self._rewritten("causal_softmax_forward", x, (*x.shape, scale), in_place)

    def causal_softmax_backward(self, dy: Tensor, y: Tensor, scale: float) -> Tensor:
        memory = self._memory()
        return self._rewritten("causal_softmax_backward", dy, (memory.copy(y), *dy.shape, scale), False, memory)

    def layer_norm_forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool = False
    ) -> list[Tensor | None]:
        """y, mean (None of an RMS norm), rstd."""
        rows, options = (x.shape[:1], torch.float32), (*x.shape, eps, CODES[x.dtype], _code(weight, x))
        return self._noted(
            "layer_norm_forward", 0, [_like(x), None if rms else rows, rows], [x, weight, bias], *options
        )

    def layer_norm_backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        want_bias: bool = True,
    ) -> list[Tensor | None]:
        """dx, dweight, dbias. mean None: of an RMS norm."""
        made = [_like(x), _like(weight), _like(weight) if want_bias else None, self._workspace(*x.shape)]
        options = *x.shape, CODES[x.dtype], _code(weight, x)
        return self._op("layer_norm_backward", made, [dy, x, weight, mean, rstd], *options)[:3]

    def residual_norm_forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor | None,
        beta: Tensor | None,
        eps: float,
        dropout: Dropout | None,
        rms: bool = False,
    ) -> list[Tensor | None]:
        """y, h, mean (None of an RMS norm), rstd of x [batch, positions, width]."""
        rows = [x.shape[0] * x.shape[1]], torch.float32
        made = [_like(x), _like(x), None if rms else rows, rows]
        options = eps, dropout, CODES[x.dtype], _code(weight, x)
        return self._noted("residual_norm_forward", 0, made, [x, bias, residual, weight, beta], *x.shape, *options)

    def residual_norm_backward(
        self,
        dy: Tensor,
        dh: Tensor | None,
        h: Tensor,
        weight: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        dropout: Dropout | None,
        want_bias: bool = True,
        want_beta: bool = True,
    ) -> list[Tensor | None]:
        """dx (None without dropout), dresidual, dbias, dweight, dbeta."""
        bias = h[0, 0] if weight is None else weight  # as large as the bias, and of its dtype
        wanted = (dropout, h), (True, h), (want_bias, bias), (weight is not None, weight), (want_beta, weight)
        made = [_like(each) if want else None for want, each in wanted]
        options = *h.shape, dropout, CODES[h.dtype], _code(weight, h)
        workspace = self._workspace(h.shape[0] * h.shape[1], h.shape[2])
        given = [dy, dh, h, weight, mean, rstd]
        written = 0 if dropout else 1
        return self._noted("residual_norm_backward", written, [*made, workspace], given, *options)[:5]

    def bias_activation_forward(self, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        size, number = units_of(x, kind), ACTIVATIONS[kind]
        options = *size, number, CODES[x.dtype]
        return self._noted("bias_activation_forward", 0, [(size, x.dtype)], [x, bias], *options)[0]

    def bias_activation_backward(self, dy: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> list[Tensor | None]:
        """dx, and dbias where there is a bias."""
        made, options = [_like(x), _like(bias), self._workspace(*x.shape)], (*dy.shape, ACTIVATIONS[kind])
        return self._noted("bias_activation_backward", 0, made, [dy, x, bias], *options, CODES[x.dtype])[:2]

    def rope_forward(self, qkv: Tensor, angles: Pair, gains: Pair, eps: float | None) -> Tensor:
        """qkv [tokens, groups, queries + 2, width]; `angles`: cos and sin [rows, width / 2], or None; eps None: no
        norm."""
        options = _rope_options(qkv, angles, gains, eps)
        return self._op("rope_forward", [_like(qkv)], [qkv, *angles, *gains], *options)[0]

    def rope_backward(
        self, dout: Tensor, qkv: Tensor | None, angles: Pair, gains: Pair, eps: float | None
    ) -> list[Tensor | None]:
        """dqkv, and dq_gain and dk_gain where there are gains."""
        made = [_like(dout), *map(_like, gains), self._workspace(dout.shape[:-1].numel(), dout.shape[-1])]
        options = _rope_options(dout, angles, gains, eps)
        return self._op("rope_backward", made, [dout, qkv, *angles, *gains], *options)[:3]

    def join_heads(
        self, dq: Tensor, dk: Tensor, dv: Tensor, bias_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None]:
        """dqkv [tokens, groups, queries + 2, width], and dbias unless its dtype is None."""
        tokens, groups, width = dk.shape
        queries = dq.shape[1] // groups if groups else 1
        columns, code = groups * (queries + 2) * width, CODES[bias_dtype or dq.dtype]
        made = [((tokens, groups, queries + 2, width), dq.dtype), ((columns,), bias_dtype) if bias_dtype else None]
        options = tokens, groups, queries, width, CODES[dq.dtype], code
        dqkv, dbias, _ = self._op("join_heads", [*made, self._workspace(tokens, columns)], [dq, dk, dv], *options)
        return dqkv, dbias

    def add_token_rows(self, table: Tensor, dy: Tensor, tokens: Tensor) -> Tensor:
        """What the table becomes."""
        memory, (ordered, order) = self._memory(), tokens.sort(stable=True)
        data = memory.copy(table, written=True)
        given = [memory.copy(each) for each in (dy, ordered, order)]
        self._call(memory, "add_token_rows", data, *given, *dy.shape, CODES[dy.dtype])
        return data.tensor

    def dropout(self, x: Tensor, dropout: Dropout, in_place: bool = False) -> Tensor:
        """x [batch, heads, positions, width]."""
        return self._rewritten("dropout", x, (*x.shape, dropout), in_place)

    def cross_entropy(
        self, logits: Tensor, targets: Tensor, loss: Loss, want_gradient: bool = True, padding: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Losses, and what the logits became; in memory each row is followed by `padding` elements to leave alone."""
        memory, (rows, columns) = self._memory(), logits.shape
        losses, data = memory.new([rows], torch.float32), self._padded(memory, logits, padding, want_gradient)
        arguments = losses, data, columns + padding, memory.copy(targets), rows, columns, loss.struct
        self._call(memory, "cross_entropy", *arguments, want_gradient, CODES[logits.dtype])
        return losses.tensor, _unpadded(data, columns)

    def cross_entropy_e5m2(
        self, logits: Tensor, targets: Tensor, loss: Loss, log_sum: Tensor | None = None, padding: int = 0
    ) -> tuple[Tensor | None, Tensor]:
        """Losses and gradient in e5m2; with `log_sum` no losses, as of cut columns. Rows are aligned, and followed by
        `padding` elements, a multiple of 8, and up to 7 more."""
        memory, (rows, columns) = self._memory(), logits.shape
        stride = -(-columns // 8) * 8 + padding
        data = self._padded(memory, logits, stride - columns, False)
        gradient, struct = memory.new([rows, stride + 8], torch.uint8), loss.struct
        struct.gradient, struct.gradient_stride = gradient.pointer, stride + 8
        code, places = CODES[logits.dtype], (data, stride, memory.copy(targets))
        losses = None if log_sum is not None else memory.new([rows], torch.float32)
        if losses is not None:
            self._call(memory, "cross_entropy", losses, *places, rows, columns, struct, True, code)
        else:
            sums = memory.optional(log_sum)
            self._call(memory, "cross_entropy_gradient", *places, sums, rows, columns, struct, code)
        found = _unpadded(gradient, columns).contiguous().view(torch.float8_e5m2)
        return None if losses is None else losses.tensor, found

    def cross_entropy_stats(self, logits: Tensor, targets: Tensor, loss: Loss, padding: int = 0) -> Tensor:
        memory, (rows, columns) = self._memory(), logits.shape
        stats, data = memory.new([rows, 2], torch.float32), self._padded(memory, logits, padding, False)
        arguments = stats, data, columns + padding, memory.copy(targets), rows, columns, loss.struct
        self._call(memory, "cross_entropy_stats", *arguments, CODES[logits.dtype])
        return stats.tensor

    def cross_entropy_gradient(
        self, logits: Tensor, targets: Tensor, log_sum: Tensor, loss: Loss, padding: int = 0
    ) -> Tensor:
        memory, (rows, columns) = self._memory(), logits.shape
        data = self._padded(memory, logits, padding, True)
        arguments = data, columns + padding, memory.copy(targets), memory.copy(log_sum), rows, columns
        self._call(memory, "cross_entropy_gradient", *arguments, loss.struct, CODES[logits.dtype])
        return _unpadded(data, columns)

    def quantize_blocks(self, x: Tensor, bits: int, mask: Tensor | None = None) -> Tensor:
        """The message of x [blocks, width]."""
        size = len(x) * (4 + x.shape[1] * bits // 8) // 4
        (message,) = self._op("quantize_blocks", [([size], torch.int32)], [x, mask], len(x), bits)
        return message.view(torch.uint8)

    def dequantize_blocks(self, message: Tensor, blocks: int, bits: int, mask: Tensor | None = None) -> Tensor:
        made = [([blocks, 1024 if bits == 1 else 256], torch.float32)]
        return self._op("dequantize_blocks", made, [message.view(torch.int32), mask], blocks, bits)[0]

    def quantize_fp8(
        self, x: Tensor, amax: Tensor, e5m2: bool, both: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Bytes of x [rows, width] and of its transpose, and the scale, a scalar."""
        made = (x.shape, torch.uint8), (x.shape[::-1], torch.uint8) if both else None, ([1], torch.float32)
        options = *x.shape, e5m2, CODES[x.dtype]
        y, transposed, scale = self._op("quantize_fp8", made, [x, amax.view(1)], *options)
        return y, transposed, scale[0]

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
        rate: float | None = None,
    ) -> list[State]:
        """The states after one step. `rate` replaces the learning rate of the options."""
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
        numbers.append(None if rate is None else memory.copy(torch.tensor([rate], dtype=torch.float64)))
        rates = o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.adam
        self._call(memory, "adamw", structs, len(states), *rates, *numbers, CODES[dtype])
        return after

    def attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, layout: str = "bshd", window: int = NO_WINDOW
    ) -> tuple[Tensor, Tensor]:
        """out [batch, heads, queries, width], lse [batch, heads, queries]."""
        memory = self._memory()
        inputs = _heads(memory, [q, k, v], layout)
        (out,) = _heads(memory, [torch.empty_like(q)], layout, written=True)
        lse = memory.new(q.shape[:3], torch.float32)
        heads = [_heads_struct(each) for each in (out, *inputs)]
        options = *q.shape[:3], *k.shape[2:], scale, window, CODES[q.dtype]
        self._call(memory, "gptlite_cpu_attention_forward", heads[0], lse, *heads[1:], *options)
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
        window: int = NO_WINDOW,
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv."""
        memory = self._memory()
        inputs = _heads(memory, [q, k, v], layout)
        gradients = _heads(memory, [torch.empty_like(each) for each in (q, k, v)], layout, written=True)
        outs = [_heads(memory, [each], layout)[0] for each in (dout, out)]
        *first, q_, k_, v_ = [_heads_struct(each) for each in (*gradients, *outs, *inputs)]
        options = *q.shape[:3], *k.shape[2:], scale, window, CODES[q.dtype]
        self._call(memory, "gptlite_cpu_attention_backward", *first, memory.copy(lse), q_, k_, v_, *options)
        return tuple(gradients)

    def weight_gradient(
        self, dy: Tensor, x: Tensor, out_dtype: torch.dtype = torch.float32, threads: int = 1
    ) -> list[Tensor]:
        """dw [outputs, inputs], dbias [outputs] of dy [rows, outputs] and x [rows, inputs]."""
        made = [((dy.shape[1], x.shape[1]), out_dtype), (dy.shape[1:], out_dtype)]
        options = *dy.shape, x.shape[1], CODES[dy.dtype], CODES[out_dtype], threads
        return self._op("gptlite_cpu_weight_gradient", made, [dy, x], *options)

    def _memory(self) -> Memory:
        return Memory(self.offsets)

    def _workspace(self, rows: int, width: int) -> Made:
        return [self.library.gptlite_rows_workspace(rows, width)], torch.float32

    def _op(self, op: str, made: Sequence[Made | None], given: Sequence[Tensor | None], *options: object) -> list:
        """What an op writes into outputs of these shapes and dtypes; None: NULL."""
        memory = self._memory()
        outs = [None if each is None else memory.new(*each) for each in made]
        self._call(memory, op, *outs, *map(memory.optional, given), *options)
        return [None if each is None else each.tensor for each in outs]

    def _noted(
        self, op: str, which: int, made: Sequence[Made | None], given: Sequence[Tensor | None], *options: object
    ) -> list:
        """The same of an op that also notes the amax of one of its outputs, `which`, if it is asked to, here unless
        the count of its first tensor's rows is 2, 6, ..."""
        memory = self._memory()
        outs = [None if each is None else memory.new(*each) for each in made]
        first = next(each for each in given if each is not None)
        amax = None if first.shape[0] % 4 == 2 else memory.copy(torch.zeros(1), written=True)
        self._call(memory, op, *outs, *map(memory.optional, given), *options, amax)
        written = outs[which]
        assert written is not None
        if amax is not None and (written.tensor.numel() or amax.tensor[0] != 0):
            wanted = written.tensor.abs().amax().float()  # NaN if one is
            assert torch.equal(amax.tensor.nan_to_num(-1), wanted.view(1).nan_to_num(-1)), f"{op}: amax {amax.tensor}"
        return [None if each is None else each.tensor for each in outs]

    def _rewritten(self, op: str, x: Tensor, arguments: tuple, in_place: bool, memory: Memory | None = None) -> Tensor:
        """What an op makes of x, in place or beside it."""
        memory = memory or self._memory()
        data = memory.copy(x, written=in_place)
        y = data if in_place else memory.new(x.shape, x.dtype)
        self._call(memory, op, y, data, *arguments, CODES[x.dtype])
        return y.tensor

    def _dropout(self, memory: Memory, dropout: Dropout) -> GptliteDropout:
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

    def _call(self, memory: Memory, op: str, *given: object) -> None:
        function = getattr(self.library, op if op.startswith("gptlite_") else self.prefix + op)
        function.argtypes = [*signatures()[op], ctypes.c_void_p]
        assert len(given) == len(signatures()[op]), f"{op} takes {len(signatures()[op])} arguments"
        arguments = [self._dropout(memory, each) if isinstance(each, Dropout) else each for each in given]
        memory.remember()
        context = None if self.threads is None else ctypes.byref(self.threads.struct)
        status = self._run(function, [*map(argument, arguments), context], memory)
        assert status == 0, f"{op} returned {status}"
        memory.check()

    def _run(self, function: ctypes._CFuncPtr, arguments: list, memory: Memory) -> int:
        if self.is_cpu:
            limit_isa(self.library, self.isa)
        return function(*arguments)


def _like(tensor: Tensor | None) -> Made | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _rope_options(qkv: Tensor, angles: Pair, gains: Pair, eps: float | None) -> tuple:
    tokens, groups, rows, width = qkv.shape
    count = 0 if angles[0] is None else len(angles[0])
    dtypes = [gain.dtype for gain in gains if gain is not None]
    options = tokens, count, groups, rows - 2, width, -1.0 if eps is None else eps
    return *options, CODES[qkv.dtype], CODES[(dtypes or [qkv.dtype])[0]]


def _code(weight: Tensor | None, x: Tensor) -> int:
    """The dtype of a norm's parameters."""
    return CODES[(x if weight is None else weight).dtype]


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
