"""Checks, sizes and description of a GPT's mixture of experts. Does not import torch."""

from gptlite.errors import ConfigError
from gptlite.limits import EXPERTS
from gptlite.models.gpt.config import GPTConfig


def check_experts(config: GPTConfig) -> None:
    """Raise ConfigError for an invalid mixture of experts."""
    moe = config.moe
    if moe.experts < 0:
        raise ConfigError(f"model.moe.experts={moe.experts} must be 0 (dense MLP) or the number of experts")
    if not moe.experts:
        return
    for key in ("top_k", "every", "d_ff"):
        if (value := getattr(moe, key)) is not None and value < 1:
            raise ConfigError(f"model.moe.{key}={value} must be at least 1")
    for key in ("shared", "bias_rate", "sequence_loss", "z_loss"):
        if (value := getattr(moe, key)) < 0:
            raise ConfigError(f"model.moe.{key}={value:g} must be at least 0; 0 turns it off")
    if moe.experts * config.num_layers > EXPERTS * moe.every:
        raise ConfigError(
            f"model.moe.experts={moe.experts} in model.num_layers={config.num_layers} layers are more than {EXPERTS:,} "
            "experts; lower one of them"
        )
    if moe.top_k > moe.experts:
        raise ConfigError(
            f"model.moe.top_k={moe.top_k} is above model.moe.experts={moe.experts}; use model.moe.top_k={moe.experts}"
        )
    if moe.every > config.num_layers:
        raise ConfigError(
            f"model.moe.every={moe.every} is above model.num_layers={config.num_layers}, so no layer has experts; "
            f"use at most {config.num_layers}"
        )


def mlp_sizes(config: GPTConfig) -> dict[str, int]:
    """Return `{key: width}` of the hidden layers of MLPs and experts."""
    sizes = {"model.d_ff": config.ffn_size} if config.moe_layers < config.num_layers else {}
    return sizes | ({"model.moe.d_ff": config.expert_size} if config.moe_layers else {})


def experts_words(config: GPTConfig) -> str:
    """Return the description of the experts for the banner, empty without experts."""
    moe = config.moe
    if not moe.experts:
        return ""
    shared = f" and {moe.shared} shared" if moe.shared else ""
    layers = "" if config.moe_layers == config.num_layers else f" in {config.moe_layers} layers"
    return f", {moe.top_k} of {moe.experts} experts{shared} per token, expert width {config.expert_size}{layers}"
