"""Train nanoGPT and gptlite from the same weights on the same batches in fp32, and compare their losses.

python tools/compare_nanogpt.py peer=PATH_TO_NANOGPT [steps=50] [lr=1e-3] [warmup=100] [tolerance=1e-5]

Prints both loss curves. Exits with 1 if the losses of any step differ by more than the relative tolerance. The warm-up
is necessary, since Adam turns rounding noise in tiny gradients into updates of full size. At the full learning rate,
this effect makes the losses of two correct programs differ by 5e-3.
"""

from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from nanogpt import Size, check_clone, nanogpt_model

from gptlite.config.command_line import run_tool

SIZE = Size(vocab_size=512, d_model=128, num_heads=4, num_layers=4, sequence_length=64, batch_size=8)


@dataclass
class Arguments:
    """Command-line arguments."""

    peer: str = "???"
    steps: int = 50
    lr: float = 1e-3
    warmup: int = 100
    tolerance: float = 1e-5


def main(arguments: Arguments) -> int:
    """Train both models, print their losses, and return the exit code."""
    check_clone(arguments.peer)
    import torch
    from real_step import config_of

    from gptlite.models.gpt.config import MLPKind
    from gptlite.models.gpt.model import GPT
    from gptlite.optimizer.build import build_optimizer
    from gptlite.optimizer.clip import clip_gradients, local_grad_norm
    from gptlite.optimizer.config import AdamWConfig

    torch.manual_seed(0)
    peer = nanogpt_model(arguments.peer, SIZE, bias=True)
    ours = GPT(replace(config_of(SIZE), bias=True, mlp=MLPKind.gelu_erf))
    ours.load_state_dict(translated(peer.state_dict()))
    optimizer = build_optimizer(AdamWConfig(lr=0.0), ours.named_parameters())
    with redirect_stdout(StringIO()):
        peer_optimizer = peer.configure_optimizers(0.1, 0.0, (0.9, 0.95), "cpu")
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    print("step      nanoGPT      gptlite   relative difference")
    for step in range(arguments.steps):
        # Each token determines the next one, so that the loss can decrease.
        start = torch.randint(SIZE.vocab_size, (SIZE.batch_size, 1), generator=generator)
        tokens = (start + 7 * torch.arange(SIZE.sequence_length + 1)) % SIZE.vocab_size
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        for current_optimizer in (optimizer, peer_optimizer):
            for group in current_optimizer.param_groups:
                group["lr"] = arguments.lr * (step + 1) / (arguments.warmup + 1)
        loss = ours(x, y) / y.numel()
        loss.backward()
        clip_gradients(ours.parameters(), 1.0, local_grad_norm(ours.parameters()))
        peer_loss = peer(x, y)[1]
        peer_loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        for current_optimizer in (optimizer, peer_optimizer):
            current_optimizer.step()
            current_optimizer.zero_grad(set_to_none=True)
        difference = abs(loss.item() / peer_loss.item() - 1)
        worst = max(worst, difference)
        print(f"{step + 1:4d} {peer_loss.item():12.7f} {loss.item():12.7f}   {difference:.1e}")
    print(f"largest relative difference over {arguments.steps} steps: {worst:.1e} (tolerance {arguments.tolerance:g})")
    return int(worst > arguments.tolerance)


def translated(state: dict[str, Any]) -> dict[str, Any]:
    """Return nanoGPT's parameters with our names. The rows of q|k|v are regrouped by head."""
    names = {
        "transformer.wte.": "token_embedding.",
        "transformer.wpe.": "position_embedding.",
        "transformer.h.": "layers.",
        "transformer.ln_f.": "final_norm.",
        "lm_head.": "head.",
        ".ln_1.": ".attn_norm.",
        ".ln_2.": ".mlp_norm.",
        ".c_attn.": ".qkv.",
        ".attn.c_proj.": ".attn.proj.",
        ".c_fc.": ".up.",
        ".mlp.c_proj.": ".mlp.down.",
    }
    result = {}
    for key, value in state.items():
        for theirs, our in names.items():
            key = key.replace(theirs, our)
        if ".qkv." in key:
            value = (
                value.view(3, SIZE.num_heads, SIZE.d_model // SIZE.num_heads, -1).transpose(0, 1).reshape(value.shape)
            )
        result[key] = value
    return result


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
