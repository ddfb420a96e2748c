"""A model with its configuration: the interface between a run and any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gptlite.errors import ConfigError, one_line
from gptlite.models.base import BaseSpec, Matrices
from gptlite.models.capabilities import MuonMatrices, PlainModule, capability, required
from gptlite.models.registry import spec_of
from gptlite.ops.inputs import Inputs
from gptlite.ops.select import Ops
from gptlite.parallelism.layout import split_layers
from gptlite.precision import Policy
from gptlite.torch_private.modules import is_persistent


@dataclass(frozen=True)
class Model:
    """A model spec with its configuration.

    `dtype`: dtype of the activations. `autocast`: dtype of autocast, for a model whose spec does not set `casts`; None
    turns autocast off.
    """

    spec: BaseSpec
    config: Any
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, config: Any, policy: Policy | None = None) -> Model:
        """Return the model of a configuration, with the dtypes of a precision policy (fp32 if that is None)."""
        spec = spec_of(config)
        if policy is None:
            return cls(spec, config)
        casts = spec.casts or policy.compute_dtype == torch.float32
        return cls(spec, config, policy.stream_dtype, None if casts else policy.compute_dtype)

    @cached_property
    def tied(self) -> Mapping[str, str]:
        """`{copy: owner}` of tied parameters, see BaseSpec.tied."""
        return self.spec.tied(self.config)

    def build(self, ops: Ops, seed: int) -> nn.Module:
        """Build the whole model on the meta device, without memory: each rank allocates only its parts. Raises
        ConfigError if the spec's `build` fails."""
        name = self.spec.name
        try:
            with torch.device("meta"):
                whole = self.spec.build(self.config, ops, seed)
        except ConfigError:
            raise
        except Exception as error:  # a plugin's method may raise anything
            fix = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
            raise ConfigError(f"the {name} model cannot be built: {one_line(error)}{fix}") from error
        if not isinstance(whole, nn.Module):
            raise ConfigError(f"the {name} model: `build` returns {type(whole).__name__}; return an nn.Module")
        return whole

    def forward(self, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
        """Return the sum of the losses, or the activations of a part without the loss: see BaseSpec.forward."""
        if self.autocast is None:
            return self.spec.forward(part, x, inputs)
        # Only for models whose layers do not cast: autocast chooses a dtype for each op, which FSDP2 cannot do.
        with torch.autocast(inputs.targets.device.type, self.autocast):
            out = self.spec.forward(part, x, inputs)
        return out.to(self.dtype) if out.dim() else out  # activations, which the next part of a pipeline receives

    def matrices(self) -> Matrices:
        """Return the matrix structure of the parameters, for Muon: see MuonMatrices."""
        if (structured := capability(self.spec, MuonMatrices)) is not None:
            return structured.matrices(self.config)
        plain = capability(self.spec, PlainModule)
        return Matrices() if plain is None else Matrices(embeddings=plain.embeddings(self.config))

    def count(self, targets: Tensor) -> Tensor:
        """Return the number of losses for these targets, a scalar tensor on their device: see BaseSpec.count."""
        return torch.as_tensor(self.spec.count(targets), device=targets.device)

    def check_pass(self, x: Any, targets: Tensor) -> None:
        """Raise ConfigError if a forward pass on inputs of these shapes fails: see PlainModule.check_pass."""
        if (plain := capability(self.spec, PlainModule)) is not None:
            plain.check_pass(self.config, x, targets)

    def activations(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the shape of the activations between blocks. Raises ValueError if the spec gives no single shape for
        all of them."""
        shape = self.spec.activations(self.config, batch, length)
        if shape is None:
            raise ValueError(f"the activations of the {self.spec.name} model may differ in shape between blocks")
        return shape

    def boundaries(self, x: Tensor, length: int, stages: int) -> list[tuple[int, ...]]:
        """Return the shape of each pipeline stage's input for a micro-batch x, whose values are not read. `length`:
        sequence length of the activations."""
        shape = self.spec.activations(self.config, len(x), length)
        if shape is not None:
            return [tuple(x.shape), *[shape] * (stages - 1)]
        shapes = required(self.spec, PlainModule, "parallelism.pipeline").input_shapes(self.config, x)
        return [shapes[blocks.start] for blocks in self.stage_blocks(stages)]

    def flops_per_token(self, length: int) -> int | None:
        """Return the FLOPs per token of a forward and backward pass on sequences of `length`; None if the model has no
        formula."""
        found, count = self.spec.flops(self.config, length), self.spec.num_blocks(self.config)
        return None if found is None or count is None else count * found[0] + found[1]

    def stage_blocks(self, stages: int) -> list[range]:
        """Return the blocks of each pipeline stage, with balanced FLOPs. The layers after the last block count
        towards the last stage. Raises ValueError if the model's number of blocks is unknown."""
        count = self.spec.num_blocks(self.config)
        if count is None:
            raise ValueError(f"the {self.spec.name} model has no stages, since its number of blocks is unknown")
        block, end = self.spec.flops(self.config, self.spec.max_length(self.config) or 1) or (1, 0)
        return split_layers(count, stages, block, end)

    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        """Return the blocks of a part by their number in the whole model."""
        return self.spec.blocks(part)

    def named_weights(self, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with their names in the whole model. A tied copy has the name of the parameter that it
        copies."""
        for name, parameter in part.named_parameters():
            yield self.tied.get(name, name), parameter

    def named_buffers(self, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers, which a checkpoint stores, with their names."""
        for path, module in part.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if is_persistent(module, name):
                    yield f"{path}.{name}" if path else name, buffer

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return `{name: shape}` of the whole model's parameters. Tied parameters appear once."""
        return {name: tuple(weight.shape) for name, weight in self.named_weights(self.build(Ops(), 0))}

    def initial_buffers(self) -> dict[str, Tensor]:
        """Return `{name: initial value}` of the whole model's persistent buffers, which a checkpoint stores."""
        names = [name for name, _ in self.named_buffers(self.build(Ops(), 0))]
        values = self.spec.buffers(self.config, Ops(), 0) if names else {}
        return {name: values[name].clone() for name in names}

    def tie(self, part: nn.Module) -> None:
        """Tie parameters again in a part that holds both parameters of a tied pair, since moving a module to another
        device unties them."""
        for copy, owner in self.tied.items():
            if (found := _parameter(part, owner)) is not None and _parameter(part, copy) is not None:
                path, _, name = copy.rpartition(".")
                setattr(part.get_submodule(path), name, found)

    def tied_copies(self, parts: Sequence[nn.Module]) -> Iterator[tuple[nn.Parameter | None, nn.Parameter | None]]:
        """Yield each tied pair: the owner, and its copy in another part. A parameter that these parts do not hold is
        None."""
        for copy, owner in self.tied.items():
            owners = [_parameter(part, owner) for part in parts]
            # A part that holds both has one parameter for them.
            copies = [
                _parameter(part, copy) if held is None else None for part, held in zip(parts, owners, strict=True)
            ]
            yield next((p for p in owners if p is not None), None), next((p for p in copies if p is not None), None)

    def fill_buffers(self, part: nn.Module, ops: Ops, seed: int) -> None:
        """Set the buffers of a part that was built on the meta device to their initial values."""
        mine = dict(part.named_buffers())
        if not mine:
            return
        values = self.spec.buffers(self.config, ops, seed)
        with torch.no_grad():
            for name, buffer in mine.items():
                buffer.copy_(values[name])


def _parameter(part: nn.Module, name: str) -> nn.Parameter | None:
    """Return a parameter by name; None if the part has no parameter of that name."""
    module: Any = part
    for component in name.split("."):
        module = getattr(module, component, None)
        if module is None:
            return None
    return module
