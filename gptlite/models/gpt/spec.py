"""ModelSpec of the GPT. Methods import torch only when they need it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gptlite.errors import ConfigError
from gptlite.models.gpt.activations import block_bytes, head_bytes, scores_bytes
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import head_flops, layer_flops
from gptlite.models.spec import Constant, Cut, Matrices, ModelSpec, Normal
from gptlite.parallelism.layout import divisors, listed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptlite.models.gpt.huggingface import GPT2
    from gptlite.models.gpt.model import GPT
    from gptlite.models.micro_batch import MicroBatch
    from gptlite.models.sampling import Sampling
    from gptlite.ops.inputs import Inputs
    from gptlite.ops.select import Ops
    from gptlite.parallelism.stage_runner import StageRunner
    from gptlite.precision import Policy

# Two per layer are added to the residual stream, whose variance would grow with depth: see `initial`.
RESIDUAL_PROJECTIONS = ("attn.proj.weight", "mlp.down.weight")
EDGES = ("token_embedding.weight", "position_embedding.weight", "head.weight")


class GPTSpec(ModelSpec[GPTConfig]):
    """Spec of the GPT of the papers."""

    name = "gpt"
    schema = GPTConfig
    casts = True
    keyed_dropout = True
    writes_text = True
    blocks_key = "num_layers"
    positive = ("num_layers", "num_heads", "d_model", "d_ff", "vocab_size", "vocab_multiple", "sequence_length")

    def check(self, config: GPTConfig) -> None:
        if config.d_model % config.num_heads:
            raise ConfigError(
                f"model.d_model={config.d_model} is not divisible by model.num_heads={config.num_heads}; "
                f"the heads can be {listed(divisors(config.d_model))}"
            )
        if not 0 <= config.dropout < 1:
            raise ConfigError(f"model.dropout={config.dropout} must be at least 0 and below 1")

    def num_blocks(self, config: GPTConfig) -> int:
        return config.num_layers

    def tensor_sizes(self, config: GPTConfig) -> dict[str, int]:
        return {"model.num_heads": config.num_heads, "model.d_ff": config.ffn_size}

    def table_rows(self, config: GPTConfig) -> int | None:
        return None if config.vocab_size is None else config.padded_vocab_size

    def product_sizes(self, config: GPTConfig) -> dict[str, int]:
        return {"model.d_model": config.d_model, "model.d_ff": config.ffn_size}

    def norms_have_biases(self, config: GPTConfig) -> bool:
        return config.bias

    def max_length(self, config: GPTConfig) -> int:
        return config.sequence_length

    def takes_context(self, config: GPTConfig) -> bool:
        return True

    def flops(self, config: GPTConfig, length: int) -> tuple[int, int]:
        return layer_flops(config, length), head_flops(config)

    def activation_bytes(
        self, config: GPTConfig, batch: MicroBatch, recompute: str, blocks: int, last: bool
    ) -> tuple[int, int]:
        kept = blocks * block_bytes(config, batch, recompute)
        if recompute != "none":
            kept += block_bytes(config, batch)  # of the block that is computed again
        return kept, max(scores_bytes(config, batch), head_bytes(config, batch) if last else 0)

    def attention(self, config: GPTConfig) -> tuple[int, int, bool]:
        return config.num_heads, config.head_dim, config.dropout > 0

    def words(self, config: GPTConfig) -> str:
        return (
            f"{config.num_layers} layers, {config.num_heads} heads, d {config.d_model}, vocabulary {config.vocab_size} "
            f"in {config.padded_vocab_size} rows"
        )

    def huggingface(self) -> GPT2:
        from gptlite.models.gpt.huggingface import GPT2

        return GPT2()

    def build(self, config: GPTConfig, ops: Ops, seed: int) -> GPT:
        from gptlite.models.gpt.model import GPT

        return GPT(config, ops, seed)

    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        return {int(number): block for number, block in part.layers.items()}  # type: ignore[operator,union-attr]

    def forward(self, part: nn.Module, x: Tensor, inputs: Inputs) -> Tensor:
        return part(x, inputs.targets, inputs.sample_ids, documents=inputs.documents, upstream=inputs.upstream)

    def keep(self, part: nn.Module, config: GPTConfig, blocks: range) -> None:
        part.keep(blocks)  # type: ignore[operator]

    def activations(self, config: GPTConfig, batch: int, length: int) -> tuple[int, ...]:
        return batch, length, config.d_model

    def cuts(self, config: GPTConfig) -> Mapping[str, Cut]:
        return {
            "token_embedding": Cut.vocabulary,
            "head": Cut.vocabulary,
            "layers.*.attn.qkv": Cut.column,
            "layers.*.attn.proj": Cut.row,
            "layers.*.mlp.up": Cut.column,
            "layers.*.mlp.down": Cut.row,
        }

    def tied(self, config: GPTConfig) -> Mapping[str, str]:
        return {"head.weight": "token_embedding.weight"} if config.tied_embeddings else {}

    def initial(self, config: GPTConfig, name: str, shape: tuple[int, ...]) -> Normal | Constant:
        """Return GPT-2's initial values: N(0, init_std), residual projections times 1/sqrt(2 layers), biases 0, norms
        1."""
        if name.endswith("norm.weight"):
            return Constant(1.0)
        if name.endswith("bias"):
            return Constant(0.0)
        scale = 1 / math.sqrt(2 * config.num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else 1.0
        return Normal(config.init_std * scale)

    def prepare(self, part: nn.Module, policy: Policy, recomputes: bool) -> None:
        from gptlite.models.gpt.model import prepare

        prepare(part, policy, recomputes)

    def generate(
        self,
        runner: StageRunner,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        stop: int | None,
        cache: bool,
    ) -> Iterator[int]:
        from gptlite.models.gpt.generate import generate

        return generate(runner, prompt, max_tokens, sampling, stop=stop, cache=cache)

    def matrices(self, config: GPTConfig) -> Matrices:
        return Matrices(edges=EDGES, fused={"attn.qkv.weight": (config.num_heads, 3)})
