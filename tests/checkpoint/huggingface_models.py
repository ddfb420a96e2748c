"""Models that gptlite exports and imports, and what transformers makes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.config import load
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.tokenizers.base import NumberTokenizer, Tokenizer
from gptlite.trainer.state import model_tensors

AUTO = ("checkpoint.resume=auto", "checkpoint.load=all")
VOCABULARY = 53  # in 128 rows
SIZES = {"n_layer": 2, "n_head": 3, "n_embd": 24, "n_positions": 16, "vocab_size": VOCABULARY}
MODEL = [
    *(
        "model=gpt-lite",
        "model.num_layers=2",
        "model.num_heads=3",
        "model.d_model=24",
        "model.sequence_length=16",
        "model.name=tiny",
    ),
    *("data=synthetic", f"data.vocab_size={VOCABULARY}", f"model.vocab_size={VOCABULARY}", "data.sequence_length=16"),
]
Save = Callable[..., tuple[Path, GPT]]


def committed(root: Path) -> Save:
    """Commits a checkpoint of a model whose every parameter, padding too, is far from its initial value."""

    def commit(*overrides: str, scale: float = 0.3, tokenizer: Tokenizer | None = None) -> tuple[Path, GPT]:
        config = load([*MODEL, "run.dir=unused", "run.name=a", *overrides])
        model = GPT(config.model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean = 1.0 if name.endswith("norm.weight") else 0.0
                parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator))
        meta = {"step": 7, "data_identity": {}}
        run = Checkpointer(CheckpointConfig(), root / "ours")
        kept = tokenizer or NumberTokenizer(VOCABULARY)
        return run.save(parameters_of(model), meta, to_yaml(config), kept, print), model

    return commit


def theirs(folder: Path, **changes: Any) -> Path:
    """A GPT-2 that transformers has saved in a new folder, of SIZES but for the changes; no bias is zero."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES | {"initializer_range": 0.3} | changes))
    redraw(model, "bias", 0.0)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def redraw(model: nn.Module, suffix: str, mean: float) -> None:
    """Draws parameters that all begin as `mean`."""
    for name, parameter in model.named_parameters():
        if name.endswith(suffix):
            parameter.normal_(mean, 0.3)


def restored(step: Path) -> GPT:
    model = GPT(from_yaml(read_config(step)).model)
    load_tensors(step, parameters_of(model), strict=False)
    return model.eval()


def parameters_of(model: GPT) -> dict[str, Tensor]:
    return model_tensors(Model.of(model.config), [model])


@torch.no_grad()
def our_logits(model: GPT, tokens: Tensor) -> Tensor:
    return F.linear(model.eval().hidden(tokens, None), model.head.weight[: model.config.vocab_size])


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    model, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert {name: list(left) for name, left in report.items() if left} == {}
    return model.eval()(tokens).logits


def some_tokens(vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (3, 16), generator=torch.Generator().manual_seed(1))


def same_logits(model: GPT, folder: Path) -> None:
    ours, theirs = our_logits(model, some_tokens()), their_logits(folder, some_tokens())
    assert ours.shape == theirs.shape
    assert ours.std() > 0.5  # or all would agree
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def weights_in(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
