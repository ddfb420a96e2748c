"""Spec of the GPT. Methods import torch only when they need it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gptlite.errors import ConfigError
from gptlite.models.base import BaseSpec, Constant, Cut, Matrices, Normal
from gptlite.models.gpt.config import GPTConfig, MoEConfig, Norm, Position
from gptlite.models.gpt.experts import check_experts, experts_words, mlp_sizes
from gptlite.models.gpt.flops import head_flops, idle_parameters, layer_flops
from gptlite.parallelism.layout import divisors, listed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gptlite.models.capabilities import Sampling
    from gptlite.models.gpt.model import GPT
    from gptlite.ops.inputs import Inputs
    from gptlite.ops.select import Ops
    from gptlite.parallelism.mesh import Mesh
    from gptlite.parallelism.stage_runner import StageRunner
    from gptlite.precision import Policy

# Projections whose outputs are added to the residual stream. They are scaled down in `initial`, since the stream's
# variance would otherwise grow with depth.
RESIDUAL_PROJECTIONS = ("attn.proj.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down")
EDGES = ("token_embedding.weight", "position_embedding.weight", "head.weight", "mlp.router.weight")


class GPTSpec(BaseSpec[GPTConfig]):
    """Spec of the pre-norm GPT."""

    name = "gpt"
    schema = GPTConfig
    casts = True
    keyed_dropout = True
    blocks_key = "num_layers"
    positive = (
        *("num_layers", "num_heads", "kv_heads", "head_dim", "d_model", "d_ff"),
        *("vocab_size", "vocab_multiple", "sequence_length"),
    )
    renamed: Mapping[str, str] = {"activation": "mlp", "layer_norm_eps": "norm_eps"}
    removed: Mapping[str, object] = {"value_embeddings": 0}

    def check(self, config: GPTConfig) -> None:
        if config.head_dim is None and config.d_model % config.num_heads:
            raise ConfigError(
                f"model.d_model={config.d_model} is not divisible by model.num_heads={config.num_heads}; "
                f"model.num_heads can be {listed(divisors(config.d_model))}, or set model.head_dim"
            )
        if config.num_heads % config.num_kv_heads:
            raise ConfigError(
                f"model.num_heads={config.num_heads} is not divisible by model.kv_heads={config.num_kv_heads}; "
                f"model.kv_heads can be {listed(divisors(config.num_heads))}"
            )
        if config.position is Position.rope and config.head_width % 2:
            raise ConfigError(
                f"model.position=rope needs an even head width, not {config.head_width}; set model.head_dim"
            )
        if not config.norm_gain and config.norm is not Norm.rms_norm:
            raise ConfigError(f"model.norm_gain=false needs model.norm=rms_norm, not {config.norm.value}")
        check_experts(config)
        if any(window < 0 for window in config.windows):
            raise ConfigError(f"model.windows={config.windows}: each must be positive, or 0 for full attention")
        for key in ("softcap", "rope_base", "rope_scaling"):
            if (value := getattr(config, key)) is not None and not value > 0:
                off = "; null turns it off" if key == "softcap" else ""
                raise ConfigError(f"model.{key}={value:g} must be above 0{off}")
        if not 0 < config.init_std < math.inf:
            raise ConfigError(f"model.init_std={config.init_std:g} must be above 0 and finite, e.g. 0.02")
        if not 0 <= config.z_loss < math.inf:
            raise ConfigError(
                f"model.z_loss={config.z_loss:g} must be at least 0 and finite, e.g. 1e-5; 0 turns it off"
            )
        if not 0 <= config.norm_eps < math.inf:
            raise ConfigError(f"model.norm_eps={config.norm_eps:g} must be at least 0 and finite, e.g. 1e-5")
        if not 0 <= config.dropout < 1:
            raise ConfigError(f"model.dropout={config.dropout} must be at least 0 and below 1")

    def num_blocks(self, config: GPTConfig) -> int:
        return config.num_layers

    def equal_blocks(self, config: GPTConfig) -> bool:
        return not config.value_residual and config.moe_layers in (0, config.num_layers)

    def tensor_sizes(self, config: GPTConfig) -> dict[str, int]:
        heads, keys = config.num_heads, config.num_kv_heads

        def shares(ranks: int) -> bool:
            """Return True if every rank has whole key/value heads, or if several ranks can share one equally: see
            CausalSelfAttention."""
            rows = (heads // keys + 2) * config.head_width  # in a group
            equally = ranks % keys == 0 and rows % (ranks // keys) == 0
            return keys % ranks == 0 or (equally and not config.value_residual and config.qk_norm_heads)

        most = max(size for size in divisors(heads) if all(map(shares, divisors(size))))
        if most == keys < heads:
            return {"model.kv_heads": keys} | mlp_sizes(config)
        key = f"the largest tensor degree for model.num_heads={heads} with model.kv_heads={keys}"
        return {"model.num_heads" if most == heads else key: most} | mlp_sizes(config)

    def experts(self, config: GPTConfig) -> int | None:
        return config.moe.experts or None

    def idle_parameters(self, config: GPTConfig) -> int:
        return idle_parameters(config)

    def uses(self, config: GPTConfig, op: str) -> bool:
        idle = {"rope": config.position is not Position.rope, "dropout": not config.dropout}
        return not idle.get(op, False)

    def upcycled(self, config: GPTConfig, experts: int, top_k: int) -> tuple[GPTConfig, dict[str, str]]:
        if config.moe.experts:
            raise ConfigError(f"model.moe.experts={config.moe.experts}: the model already has experts")
        if config.bias:
            raise ConfigError("model.bias=true: experts have no biases; train the dense model with model.bias=false")
        moe = MoEConfig(experts=experts, top_k=top_k, d_ff=config.ffn_size)
        found = replace(config, moe=moe)
        self.check(found)
        places = [f"layers.{layer}.mlp" for layer in range(config.num_layers)]
        return found, {f"{each}.experts.{name}": f"{each}.{name}.weight" for each in places for name in ("up", "down")}

    def table_rows(self, config: GPTConfig) -> int | None:
        return None if config.vocab_size is None else config.padded_vocab_size

    def product_sizes(self, config: GPTConfig) -> dict[str, int]:
        # The head width divides the widths of the fused QKV projection and of attention's output.
        heads = {"model.head_dim": config.head_width} if config.qkv_size != 3 * config.d_model else {}
        return self.head_sizes(config) | mlp_sizes(config) | heads

    def head_sizes(self, config: GPTConfig) -> dict[str, int]:
        return {"model.d_model": config.d_model}

    def norms_have_biases(self, config: GPTConfig) -> bool:
        return config.bias and config.norm is Norm.layer_norm

    def max_length(self, config: GPTConfig) -> int:
        return config.sequence_length

    def takes_context(self, config: GPTConfig) -> bool:
        return True

    def flops(self, config: GPTConfig, length: int) -> tuple[int, int]:
        return layer_flops(config, length), head_flops(config)

    def attention(self, config: GPTConfig) -> tuple[int, int, bool]:
        return config.num_heads, config.head_width, config.dropout > 0

    def words(self, config: GPTConfig) -> str:
        shared = "" if config.kv_heads is None else f" ({config.kv_heads} for keys and values)"
        pads = config.padded_vocab_size != config.vocab_size
        padded = f" (padded to {config.padded_vocab_size})" if pads else ""
        return (
            f"{config.num_layers} layers, {config.num_heads} heads{shared}, d {config.d_model}, "
            f"vocabulary {config.vocab_size}{padded}{experts_words(config)}"
        )

    def build(self, config: GPTConfig, ops: Ops, seed: int) -> GPT:
        from gptlite.models.gpt.model import GPT

        return GPT(config, ops, seed)

    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        return {int(number): block for number, block in part.layers.items()}  # type: ignore[operator,union-attr]

    def forward(self, part: nn.Module, x: Tensor, inputs: Inputs) -> Tensor:
        return part(x, inputs.targets, inputs.sample_ids, documents=inputs.documents, upstream=inputs.upstream)

    def scores(self, part: nn.Module, x: Tensor, inputs: Inputs) -> Tensor:
        return part(x, inputs.targets, scored=True)

    def keep(self, part: nn.Module, config: GPTConfig, blocks: range) -> None:
        part.keep(blocks)  # type: ignore[operator]

    def activations(self, config: GPTConfig, batch: int, length: int) -> tuple[int, ...]:
        return batch, length, config.stage_width

    def cuts(self, config: GPTConfig) -> Mapping[str, Cut]:
        norms = {"layers.*.attn.q_norm": Cut.column, "layers.*.attn.k_norm": Cut.column}
        return (norms if config.qk_norm and not config.qk_norm_heads else {}) | {
            "token_embedding": Cut.vocabulary,
            "head": Cut.vocabulary,
            "layers.*.attn.qkv": Cut.column,
            "layers.*.attn.proj": Cut.row,
            "layers.*.mlp.up": Cut.column,
            "layers.*.mlp.down": Cut.row,
            "layers.*.mlp.experts": Cut.experts,
            "layers.*.mlp.shared.up": Cut.column,
            "layers.*.mlp.shared.down": Cut.row,
        }

    def tied(self, config: GPTConfig) -> Mapping[str, str]:
        return {"head.weight": "token_embedding.weight"} if config.tied_embeddings else {}

    def initial(self, config: GPTConfig, name: str, shape: tuple[int, ...]) -> Normal | Constant:
        """Return GPT-2's initial values: N(0, init_std) for matrices, 0 for biases, 1 for norms. For residual
        projections, the standard deviation is divided by sqrt(2 layers), or they are 0 with `zero_init`. The weights of
        ValueMix are 0.5."""
        if name.endswith("values.weight"):
            return Constant(0.5)
        if name.endswith("norm.weight"):
            return Constant(1.0)
        if name.endswith("bias"):
            return Constant(0.0)
        if config.zero_init and name.endswith(RESIDUAL_PROJECTIONS):
            return Constant(0.0)
        if len(shape) < 2:
            raise ConfigError(f"{name} {list(shape)} has no initial values; define `initial` in {type(self).__name__}")
        scale = 1 / math.sqrt(2 * config.num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else 1.0
        return Normal(config.init_std * scale)

    def buffers(self, config: GPTConfig, ops: Ops, seed: int) -> dict[str, Tensor]:
        import torch

        names = [f"layers.{layer}.mlp.router" for layer in range(config.num_layers) if config.has_experts(layer)]
        sizes = {"bias": config.moe.experts, "load": config.moe.experts, "losses": ()}
        return {f"{name}.{key}": torch.zeros(size) for name in names for key, size in sizes.items()}

    def prepare(self, part: nn.Module, policy: Policy, recomputes: bool) -> None:
        from gptlite.models.gpt.model import prepare_part

        prepare_part(part, policy, recomputes)

    def begin_step(self, config: GPTConfig, parts: Sequence[nn.Module], upstream: Tensor) -> None:
        if not config.moe_layers:
            return
        from gptlite.models.experts import begin

        begin(parts, upstream)

    def end_step(self, config: GPTConfig, parts: Sequence[nn.Module], mesh: Mesh) -> Tensor | None:
        if not config.moe_layers:
            return None
        from gptlite.models.experts import balance, loads_of, routers

        balance(parts, mesh)
        blocks = {number: block for part in parts for number, block in self.blocks(part).items()}
        found = {number // config.moe.every: routers(block)[0] for number, block in blocks.items() if routers(block)}
        return loads_of(found, (config.moe_layers, config.moe.experts), mesh)

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
        queries = config.num_heads // config.num_kv_heads
        fused: dict[str, tuple[int, tuple[int, ...]]] = {"attn.qkv.weight": (config.num_kv_heads, (queries, 1, 1))}
        if config.mlp.gated:
            fused["mlp.up.weight"] = (config.ffn_size, (1, 1))
            fused["mlp.experts.up"] = (config.expert_size, (1, 1))
            fused["mlp.shared.up.weight"] = (config.moe.shared * config.expert_size, (1, 1))
        return Matrices(edges=EDGES, fused=fused, batched=("mlp.experts.up", "mlp.experts.down"))
