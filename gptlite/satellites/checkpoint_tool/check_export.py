"""Comparison of an export with the checkpoint, by loading it with transformers."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint.load import load_tensors
from gptlite.errors import ConfigError, one_line
from gptlite.models.config import ModelConfig
from gptlite.models.model import Model
from gptlite.models.scores import scores
from gptlite.ops.inputs import Inputs
from gptlite.ops.select import Ops
from gptlite.progress import Log
from gptlite.tokenizers.base import Tokenizer

MOST_BYTES = 2_000_000_000  # of weights, above which nothing is compared unless requested
TOLERANCE = 1e-3  # nats of a token's log probability; both sides compute in fp32
_SHAPE = 2, 64  # sequences and tokens that are compared
_TEXTS = ("The quick brown fox\n\n  jumps over 12345 dogs, isn't it? ", "naïve 漢字かな 😀 <|endoftext|></s>\t\r\n")


def transformers_version() -> str:
    """Return the version of the installed transformers; empty without it."""
    return version("transformers") if find_spec("transformers") else ""


def can_load(class_name: str) -> bool:
    """Return True if transformers is installed and has a class, which a plugin's adapter may name in vain."""
    if not transformers_version():
        return False
    import transformers

    return hasattr(transformers, class_name)


def check_export(
    folder: Path, step: Path, model: ModelConfig, class_name: str, dtype: torch.dtype, tokenizer: Tokenizer | None,
    log: Log,
) -> None:  # fmt: skip
    """Load the folder `folder` with transformers, and compare it with the checkpoint `step`, rounded to `dtype`.

    Random tokens must have the same log probabilities within TOLERANCE. If the folder has a tokenizer of AutoTokenizer,
    texts must have the ids of `tokenizer`. Raises ConfigError if one differs or transformers refuses the folder.
    """
    which = f"transformers {transformers_version()}"
    whole = Model.of(model)
    vocabulary = whole.spec.vocab_size(model) or 1
    length = min(_SHAPE[1], whole.spec.max_length(model) or _SHAPE[1]) + 1
    tokens = torch.randint(vocabulary, (_SHAPE[0], length), generator=torch.Generator().manual_seed(0))
    try:
        theirs = _their_scores(folder, class_name, tokens)
        if tokenizer is not None and (folder / "tokenizer.json").is_file():
            _compare_ids(folder, tokenizer)
    except ConfigError:
        raise
    except Exception as error:  # the library raises many types
        raise ConfigError(
            f"{which} does not load the export ({one_line(error)}); "
            "nothing is written. check=false writes it nevertheless"
        ) from error
    apart = (theirs - _our_scores(step, whole, tokens, dtype)).abs().max().item()
    if not apart <= TOLERANCE:
        raise ConfigError(
            f"the export has other log probabilities in {which} (up to {apart:.2g} nats apart); nothing is written. "
            "check=false writes it nevertheless"
        )
    log(f"loaded with {which}: log probabilities of {tokens.numel()} tokens are at most {apart:.1e} nats apart")


@torch.no_grad()
def _our_scores(step: Path, model: Model, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log probabilities of all tokens but the first, with the weights of the checkpoint: fp32 [B, S - 1]."""
    part = model.build(Ops(), 0).to_empty(device="cpu")
    model.tie(part)
    model.fill_buffers(part, Ops(), 0)
    tensors: dict[str, Tensor] = {f"model.{name}": each.detach() for name, each in model.named_weights(part)}
    load_tensors(step, tensors | {f"model.{name}": each for name, each in model.named_buffers(part)}, strict=False)
    for each in tensors.values():
        each.copy_(each.to(dtype))
    return scores(model, part.eval(), tokens[:, :-1], Inputs(tokens[:, 1:]))[..., 0]


@torch.no_grad()
def _their_scores(folder: Path, class_name: str, tokens: Tensor) -> Tensor:
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its progress and advice are not the user's
    try:
        load: Any = getattr(transformers, class_name).from_pretrained
        model, report = load(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    finally:
        transformers.logging.set_verbosity(level)
    if left := {name: sorted(map(str, each))[:3] for name, each in report.items() if each}:
        raise ConfigError(f"transformers {transformers.__version__} reads the export with {left}; nothing is written")
    log_p = model.eval()(tokens[:, :-1], use_cache=False).logits.float().log_softmax(-1)
    return log_p.gather(-1, tokens[:, 1:, None])[..., 0]


def _compare_ids(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    for text in _TEXTS:
        if theirs.encode(text, add_special_tokens=False) != tokenizer.encode(text):
            raise ConfigError(
                f"transformers' AutoTokenizer has other ids for {text!r} than the checkpoint's tokenizer; nothing is "
                "written. check=false writes the export nevertheless"
            )
