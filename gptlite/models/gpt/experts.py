"""Checks, sizes and words of a GPT's mixture of experts. No torch here."""

from gptlite.errors import ConfigError
from gptlite.models.gpt.config import GPTConfig


def check_experts(config: GPTConfig) -> None:
    """Raise ConfigError for experts that cannot be built."""
    moe = config.moe
    if moe.experts < 0:
        raise ConfigError(f"model.moe.experts={moe.experts}: it must be 0, for a dense MLP, or the number of experts")
    if not moe.experts:
        return
    for key in ("top_k", "every", "d_ff"):
        if (value := getattr(moe, key)) is not None and value < 1:
            raise ConfigError(f"model.moe.{key}={value} must be at least 1")
    for key in ("shared", "bias_rate", "sequence_loss", "z_loss"):
        if (value := getattr(moe, key)) < 0:
            raise ConfigError(f"model.moe.{key}={value:g} must be at least 0; 0 turns it off")
    if moe.top_k > moe.experts:
        raise ConfigError(f"model.moe.top_k={moe.top_k} is above model.moe.experts={moe.experts}")
    if moe.every > config.num_layers:
        raise ConfigError(
            f"model.moe.every={moe.every} leaves none of model.num_layers={config.num_layers} with experts; "
            "make it at most that number"
        )


def mlp_sizes(config: GPTConfig) -> dict[str, int]:
    """Return `{key: width}` of the hidden layers of MLPs and experts."""
    sizes = {"model.d_ff": config.ffn_size} if config.moe_layers < config.num_layers else {}
    return sizes | ({"model.moe.d_ff": config.expert_size} if config.moe_layers else {})


def experts_words(config: GPTConfig) -> str:
    """Return the banner's words on experts."""
    moe = config.moe
    if not moe.experts:
        return ""
    shared = f" and {moe.shared} shared" if moe.shared else ""
    layers = "" if config.moe_layers == config.num_layers else f" in {config.moe_layers} layers"
    return f", {moe.top_k}{shared} of {moe.experts} experts of width {config.expert_size}{layers}"
