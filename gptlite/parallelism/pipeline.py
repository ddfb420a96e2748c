"""Forward and backward passes over a step's micro-batches, with or without a pipeline.

The schedules are torch.distributed.pipelining's: GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B (Narayanan et al.
2019, arXiv:1806.03377), interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473), and the zero-bubble schedules,
which compute input gradients first and weight gradients later (Qi et al. 2023, arXiv:2401.10241).

A `Forward` runs a model part on tokens or activations. It returns activations, or, for the last part, the sum of the
token losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import get_schedule_class

from gptlite.errors import ConfigError
from gptlite.ops.inputs import Documents, Inputs, joined
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages, rule, splits_backward, stages_of_rank
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.zero import before_backward, gather, reshard
from gptlite.torch_private.distributed import Stage
from gptlite.torch_private.fsdp import accumulate_gradients_now, reduce_gradients_now, split_backward

Forward = Callable[[nn.Module, Tensor, Inputs], Tensor]


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of a step on this rank. Each has int64 tokens and targets [B, S] and sample_ids [B].

    If samples are not tokens, `tokens` has the inputs, and inputs and targets may have other shapes; without a pipeline
    the inputs may be a tuple or a dict of tensors. `documents` has the documents of whole sequences, for models that
    restrict attention to documents.
    """

    tokens: Sequence[Any]
    targets: Sequence[Tensor]
    sample_ids: Sequence[Tensor]
    documents: Sequence[Documents] | None = None


class OnePart:
    """Model without a pipeline: runs one micro-batch after the other."""

    def __init__(self, forward: Forward, part: nn.Module, zero: int) -> None:
        self.forward, self.part, self.zero = forward, part, zero

    def run(self, batches: MicroBatches, valid: Tensor) -> list[Tensor]:
        """Accumulate the gradients of the loss, and return each micro-batch's share of the loss: the sum of its token
        losses divided by `valid`, the number of targets in the global batch."""
        losses: list[Tensor] = []
        upstream, count = known_upstream(valid), len(batches.tokens)
        for index in range(count):
            before_backward(self.part, self.zero, last=index == count - 1)
            documents = None if batches.documents is None else batches.documents[index]
            inputs = Inputs(batches.targets[index], batches.sample_ids[index], documents, upstream)
            out = self.forward(self.part, batches.tokens[index], inputs)
            loss = out / valid
            loss.backward()
            losses.append(loss.detach())
        return losses


def known_upstream(valid: Tensor) -> float | None:
    """Return the upstream gradient that autograd will pass for a loss divided by `valid`; None if reading it would
    synchronise with a GPU."""
    # Divide with torch in fp32, as autograd does: the loss's backward pass compares autograd's value with this one.
    return (torch.ones(()) / valid).item() if valid.device.type == "cpu" else None


class Pipeline:
    """This rank's parts of a pipeline.

    `inputs` are the inputs of all stages for a micro-batch, on the meta device. If the number of micro-batches differs
    from the previous step's, a new schedule is built.
    """

    def __init__(
        self,
        forward: Forward,
        parts: Sequence[nn.Module],
        mesh: Mesh,
        config: ParallelismConfig,
        micro_batches: int,
        inputs: Sequence[Tensor],
    ) -> None:
        self.valid = torch.ones(())
        self.forward, self.parts, self.mesh, self.config = forward, parts, mesh, config
        self._numbers = stages_of_rank(config, mesh.coordinate("pp"))
        self.has_first, self.has_last = 0 in self._numbers, num_stages(config) - 1 in self._numbers
        # With these, torch does not run a forward pass to infer shapes.
        self._inputs = [*inputs, torch.empty((), device="meta")]  # of each stage, and the loss
        self._build(micro_batches)

    def _build(self, micro_batches: int) -> None:
        """Build the schedule for `micro_batches` micro-batches, with new stages, as a stage has buffers for each
        micro-batch."""
        config, mesh, total = self.config, self.mesh, num_stages(self.config)
        self._plain = [
            _Plain(self.forward, part, number, self._inputs[number + 1].shape)
            for number, part in zip(self._numbers, self.parts, strict=True)
        ]
        stages = [
            _Stage(
                plain,
                number,
                total,
                mesh.device,
                input_args=(self._inputs[number],),
                output_args=(self._inputs[number + 1],),
                group=mesh.group("pp"),
            ).over(part, micro_batches, config.zero, splits_backward(config))
            for number, part, plain in zip(self._numbers, self.parts, self._plain, strict=True)
        ]
        one = config.schedule in ("gpipe", "1f1b")
        self._micro_batches = micro_batches
        # No scaling: losses are already divided by the global batch's targets, not averaged over micro-batches.
        schedule: Any = get_schedule_class(rule(config).torch_name)
        self.schedule = schedule(stages[0] if one else stages, micro_batches, loss_fn=self._loss, scale_grads=False)

    def run(self, batches: MicroBatches, valid: Tensor) -> list[Tensor]:
        """Do what OnePart.run does. There are no shares of the loss without the last part."""
        self.valid = valid
        if len(batches.tokens) != self._micro_batches:
            self._build(len(batches.tokens))
        upstream = known_upstream(valid)
        for part in self._plain:
            part.upstream = upstream
        # Joined, as the schedule splits its arguments into micro-batches itself.
        targets, arguments = torch.cat(list(batches.targets)), {"sample_ids": torch.cat(list(batches.sample_ids))}
        if batches.documents is not None:
            documents = joined(batches.documents)
            arguments["starts"] = documents.starts
            if documents.ends is not None:
                arguments["ends"] = documents.ends
            for part in self._plain:
                part.longest = documents.longest
        inputs = (torch.cat(list(batches.tokens)),) if self.has_first else ()
        losses: list[Tensor] = []
        # `target` goes to the loss function, `targets` to every part.
        failure = None
        try:
            self.schedule.step(
                *inputs, target=targets, losses=losses, return_outputs=False, targets=targets, **arguments
            )
        except RuntimeError as error:  # torch wraps a stage's exception in one that prints all the stage's arguments
            failure = error.__cause__ or error
        if failure is not None:
            raise failure
        return [loss.detach() for loss in losses]

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output / self.valid


class _Plain(nn.Module):
    """Wrapper that hides from torch's pipeline stage that a part is an FSDP2 module.

    The stage would otherwise defer every reduction, and the freeing of gathered parameters, to the last micro-batch (so
    that ZeRO 2 and 3 cost as much memory as ZeRO 1), and gather a whole part where ZeRO 3 gathers block by block.
    """

    def __init__(self, forward: Forward, part: nn.Module, number: int, shape: torch.Size) -> None:
        super().__init__()
        self.run, self.part, self.number, self.shape = forward, part, number, shape
        self.upstream: float | None = None
        self.longest = 0

    def forward(
        self,
        x: Tensor,
        targets: Tensor,
        sample_ids: Tensor,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """Run the part. The document tensors are separate arguments because the schedule splits tensors along dim 0.
        Raises ConfigError if the output does not have the shape that the next stage expects."""
        documents = None if starts is None else Documents(starts, ends, self.longest)
        out = self.run(self.part, x, Inputs(targets, sample_ids, documents, self.upstream))
        if out.shape != self.shape:
            raise ConfigError(
                f"pipeline stage {self.number} returned a tensor of shape {list(out.shape)}, but the model's spec "
                f"declares {list(self.shape)}; correct `activations` in the spec"
            )
        return out.contiguous()  # torch's point-to-point operations refuse non-contiguous views


class _Stage(Stage):
    """Pipeline stage whose backward passes set FSDP2's flags for the ZeRO stage, see `zero.before_backward`.

    If backward passes are split, a part's gradients are reduced after the weight-gradient pass. With ZeRO 3, the part's
    parameters are gathered before the input-gradient and the weight-gradient pass, and freed after each.
    """

    def over(self, part: nn.Module, micro_batches: int, zero: int, splits: bool) -> _Stage:
        """Set the part to run, and return the stage. torch fixes the signature of the constructor."""
        self._part, self._count, self._zero, self._done = part, micro_batches, zero, 0
        if splits and isinstance(part, FSDPModule):
            split_backward(part)
        return self

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if full_backward:
            before_backward(self._part, self._zero, self._is_last_pass())
            super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
        elif self.is_first:  # tokens have no gradient, so there is no input-gradient pass
            super().backward_one_chunk(bwd_chunk_id, loss, False, last_backward)
        else:
            with self._held():
                super().backward_one_chunk(bwd_chunk_id, loss, False, last_backward)
        if full_backward and isinstance(loss, Tensor):
            loss.detach_()  # the schedule keeps the losses, whose graph keeps the stage's inputs

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        last = self._is_last_pass()  # the weight-gradient pass is the last of its micro-batch
        with self._held():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            if not isinstance(self._part, FSDPModule):
                return
            accumulate_gradients_now(self._part)
            if last or self._zero >= 2:
                before_backward(self._part, self._zero, last)
                reduce_gradients_now(self._part)

    def _is_last_pass(self) -> bool:
        self._done += 1
        return self._done % self._count == 0

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Disable gradient reduction and resharding during the input- or weight-gradient pass of a split backward pass.
        With ZeRO 3, gather the part's parameters before the pass and free them after it."""
        if not isinstance(self._part, FSDPModule):
            yield
            return
        if self._zero == 3:
            gather(self._part)
        before_backward(self._part, 0, last=False)  # as with ZeRO 0 before the last pass: no reduction, no resharding
        yield
        if self._zero == 3:
            reshard([self._part])


def add_across_ends(first: nn.Parameter | None, last: nn.Parameter | None, mesh: Mesh) -> None:
    """Sum the gradients of a tied parameter's copies on the first and last part, and store the sum in both.

    Each rank passes the copies it holds. Both stages hold the same shard of the parameter.
    """
    held = [local_tensor(p.grad) for p in (first, last) if p is not None and p.grad is not None]
    if len(held) == 2:
        held[0].add_(held[1])
        held[1].copy_(held[0])
    elif held:
        mine = held[0].contiguous().to(mesh.device)  # an offloaded gradient is on the host
        other = torch.empty_like(mine)
        group = mesh.group("pp")
        peer = dist.get_global_rank(group, mesh.size("pp") - 1 if first is not None else 0)
        ops = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
        for work in dist.batch_isend_irecv(ops):  # one batch: two sends that wait for each other would deadlock
            work.wait()
        held[0].copy_(mine + other)  # addition is commutative, so both stages get the same bits
