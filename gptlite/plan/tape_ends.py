"""The tapes of the model's two ends: the embeddings, and the final norm with the head and its loss. See tape.py."""

from __future__ import annotations

from dataclasses import dataclass

from gptlite.ops.config import PRODUCTS, SOFTMAX_BYTES, logit_rows
from gptlite.plan.parameters import table_rows
from gptlite.plan.tape import INDEX, MASTER, Sizes, Tape, masked
from gptlite.plan.workload import Workload


def embed_forward(s: Sizes) -> Tape:
    """Token and position embeddings."""
    table = s.tokens * s.width * (MASTER if s.casts else s.item)
    if s.tensor == 1:
        tape = [table, *([s.whole, -table] if s.casts else []), s.whole, -s.whole]
    else:
        tape = [INDEX * s.tokens, s.tokens, INDEX * s.tokens, table, table, -table]
        tape += [table, table, table // s.tensor, -3 * table] if s.sequence else [table, -table]
        shared = table // s.tensor if s.sequence else table
        tape += [*([s.slice, -shared] if s.casts else []), s.slice, -s.slice, -INDEX * s.tokens]
    if s.dropout:
        tape += [*masked(s, s.slice), s.slice, -s.slice]
    return tape


def embed_backward(s: Sizes, rows: int, positions: int, tied: bool) -> Tape:
    """Gradients of both tables, `rows` of them and `positions`: dense, unless `tied` rows are added to the head's."""
    item = MASTER if s.casts else s.item
    table, learned = rows * s.width * item, positions * s.width * item
    tape = [s.slice, -s.slice] if s.dropout else []
    tape += [learned] if s.holds else [learned, -learned]
    if s.tensor > 1:
        tape += [s.whole, s.whole, -s.whole] if s.sequence else []
        tape += [s.whole]
    if tied and item == MASTER and s.fused and s.device == "cpu" and s.tensor == 1:
        tape += [table] if s.casts else []  # the head's, of which one in fp32 is made
    else:
        tape += [table, *([table, -table] if tied and s.holds else [])]
    if s.tensor > 1:
        tape += [-s.whole, -s.whole if s.sequence else 0, -INDEX * s.tokens - s.tokens]
    return [*tape, *([] if s.holds else [-table]), -s.slice, -s.slice]


@dataclass(frozen=True)
class HeadTapes:
    """The final norm and the head with its loss. `gradient`: bytes of the table's, from the forward pass on, where it
    is the tape's entry `at`."""

    forward: Tape
    backward: Tape
    gradient: int
    at: int = -1

    @property
    def first(self) -> Tape:
        """The forward pass where its gradient is model state as soon as it is there."""
        return [0 if index == self.at else size for index, size in enumerate(self.forward)]


def head(s: Sizes, work: Workload, tp_rank: int, reference: bool) -> HeadTapes:
    """The gradients are made with the loss. `reference`: the loss as torch has it, of whole fp32 logits."""
    model = work.model
    table, longest = table_rows(model, s.tensor, tp_rank), table_rows(model, s.tensor, 0)
    real = max(0, min(table, (model.vocab_size or table) - tp_rank * longest))
    gathered = [s.whole, s.whole, -s.whole] if s.sequence else []
    norm = [*s.cast(s.width), s.slice, s.row, s.row]
    weight = table * s.width * s.item
    ending = [s.slice, s.workspace(s.rows, s.width), -s.workspace(s.rows, s.width), -s.slice, -s.slice, -2 * s.row]
    cast = s.cast(table * s.width)
    if reference and s.tensor == 1:
        logits = s.tokens * real * MASTER
        half = s.tokens * real * s.item if s.item < MASTER else 0
        forward = [*norm, *cast, *([half] if half else []), logits, logits, -logits, *([-half] if half else [])]
        passed = [logits, logits, -2 * logits, *([half] if half else []), s.slice, real * s.width * s.item, weight]
        passed += [-real * s.width * s.item, -half, -s.slice, *(-each for each in cast)]
        return HeadTapes(forward, [*passed, *([] if s.holds else [-weight]), *ending], weight if s.holds else 0)
    products = PRODUCTS[s.device]
    columns = longest if s.tensor > 1 else table if products.aligned else (model.vocab_size or table)
    chunk = min(s.tokens, logit_rows(s.device, s.tokens, columns, s.item))
    part, several = chunk * s.width * s.item, chunk < s.tokens
    if products.aligned:
        # The cast writes the padded table, and a product the gradient as the master has it.
        whole = products.up(table)
        copy = whole * s.width * s.item if s.casts or real < whole else 0
        logits, dtable = chunk * whole * s.item, whole * s.width * (MASTER if s.casts or several else s.item)
        tape = [*norm, *gathered, copy, logits, *_loss(s, chunk, real), part, dtable, -logits]
        at = len(tape) - 2
        if several:
            tape += [s.whole - part, logits, *_loss(s, chunk, real), -logits, s.whole, -s.whole]
        copied, cast, weight = several and not s.casts and s.item < MASTER, [], table * s.width * s.item
        at = len(tape) if copied else at
        tape += [weight, -dtable] if copied else []
        tape += [-copy]
        weight = weight if copied else dtable
    else:
        logits, dtable, kept_table = chunk * real * s.item, real * s.width * s.item, 0
        tape = [*norm, *cast, *gathered, logits, *_loss(s, chunk, real), part, dtable, -logits]
        at = len(tape) - 2
        if several:  # table gradients are added up in fp32
            kept_table = real * s.width * MASTER
            again = [logits, *_loss(s, chunk, real), dtable, -dtable, -logits]
            tape += [kept_table, -dtable, s.whole - part, *again, s.whole, -s.whole]
        copied = several or real < table
        at = len(tape) if copied else at
        tape += [weight, -(kept_table or dtable)] if copied else []
        if not copied:
            weight = dtable
    tape += [-s.whole] if s.sequence else []
    tape += [-s.slice]  # the norm's output
    passed = list[int](-each for each in cast)
    if s.tensor > 1:
        passed += [s.whole, s.slice, -2 * s.whole] if s.sequence else [s.whole, -s.whole]
    return HeadTapes(tape, [*passed, *ending], weight, at)


def _loss(s: Sizes, rows: int, columns: int) -> Tape:
    """From logits to their gradients, in their place."""
    if s.tensor == 1 and s.fused:
        return [rows * MASTER, -rows * MASTER]
    stats = [3 * rows * MASTER] * 2 + [s.tensor * 3 * rows * MASTER, -(2 + s.tensor) * 3 * rows * MASTER]
    if s.fused:
        return stats
    few = max(1, min(rows, SOFTMAX_BYTES[s.device] // (max(1, columns) * MASTER)))
    return [*(stats if s.tensor > 1 else []), few * columns * MASTER, few * columns, -few * columns * (MASTER + 1)]
