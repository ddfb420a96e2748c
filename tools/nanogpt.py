"""nanoGPT's model, imported from a clone of nanoGPT, and a training step as in its train.py."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from gptlite.errors import ConfigError


@dataclass(frozen=True)
class Size:
    """Dimensions of a model and a batch."""

    vocab_size: int
    d_model: int
    num_heads: int
    num_layers: int
    sequence_length: int
    batch_size: int


def check_clone(folder: str | Path, key: str = "peer") -> None:
    """Raise ConfigError for a folder without nanoGPT's model."""
    if not (Path(folder).expanduser() / "model.py").is_file():
        raise ConfigError(f"{key}={folder} has no model.py; give a clone of nanoGPT")


def nanogpt_model(folder: str | Path, size: Size, bias: bool = False, dropout: float = 0.0) -> Any:
    """Return nanoGPT's model. Text that nanoGPT prints is discarded."""
    sys.path.insert(0, str(Path(folder).expanduser()))
    import model as nanogpt  # pyright: ignore[reportMissingImports]

    config = nanogpt.GPTConfig(
        block_size=size.sequence_length,
        vocab_size=size.vocab_size,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.d_model,
        dropout=dropout,
        bias=bias,
    )
    with redirect_stdout(StringIO()):
        return nanogpt.GPT(config)


def nanogpt_step(folder: str | Path, size: Size, mode: str) -> Callable[[], None]:
    """Return a training step. `mode`: fp32; bf16 (autocast); or bf16_compile (autocast and torch.compile)."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nanogpt_model(folder, size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward: Any = torch.compile(model) if mode == "bf16_compile" else model
    tokens, targets = random_batch(size, device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=mode != "fp32"):
            loss = forward(tokens, targets)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def random_batch(size: Size, device: Any) -> tuple[Any, Any]:
    """Return random tokens and targets, int64[B, S]."""
    import torch

    shape = (size.batch_size, size.sequence_length)
    return tuple(torch.randint(size.vocab_size, shape, device=device) for _ in range(2))  # pyright: ignore[reportReturnType]
