"""Selection of the implementation of each op, made once and reported in the banner."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from gptlite.errors import ConfigError
from gptlite.kernels.library import LoadedLibrary, Unavailable, load
from gptlite.ops import apex
from gptlite.ops.config import Attention, CrossEntropy, Implementation, LayerNormKernel, OpsConfig

MASKED = (Attention.sdpa, Attention.fused_softmax, Attention.matmul)  # support document masks
SDPA = (Attention.sdpa, Attention.cudnn, Attention.fa3)
# Ops with a choice between our kernel and a reference.
PLAIN = ("layer_norm", "activation", "rope", "dropout", "adamw")


@dataclass(frozen=True)
class Ops:
    """Selected path of each op; True means our kernel.

    `chosen` has each op with its path and the reason: `("attention", "fused (...)")`. `note` is a remark on all ops.
    """

    attention: Attention = Attention.matmul
    cross_entropy: CrossEntropy = CrossEntropy.chunked
    layer_norm: bool = False
    activation: bool = False
    rope: bool = False
    dropout: bool = False
    linear: bool = False
    fused_scores: bool = False  # beside SDPA, our kernels join q's, k's and v's gradients and compute stored scores
    deferred_add: bool = False  # a block's last sum and its biases are computed by the next layer norm kernel
    varlen: bool = False  # documents are separated by variable-length flash attention, without dropout
    adamw: bool = False
    table: bool = False  # a tied embedding adds to the head's gradient in place, without its own dense gradient
    weight_copies: bool = False  # AdamW's kernel writes 16-bit weight copies; otherwise each forward pass casts
    apex_norm: bool = False  # Apex's layer norm; `layer_norm` is then False
    chosen: tuple[tuple[str, str], ...] = ()
    note: str = ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Each path once, with the ops that use it, e.g. `layer_norm, dropout fused (why)`. The note comes last."""
        return self.reasons_without()

    def reasons_without(self, *left_out: str) -> tuple[str, ...]:
        """Return `reasons` without the ops in `left_out`."""
        paths: dict[str, list[str]] = {}
        for op, path in self.chosen:
            if op not in left_out:
                paths.setdefault(path, []).append(op)
        return (*(f"{', '.join(names)} {path}" for path, names in paths.items()), *filter(None, [self.note]))


def select_ops(
    config: OpsConfig, device: torch.device, log: Callable[[str], None] = print, documents: bool = False
) -> Ops:
    """Return the ops that run on a device. Raises ConfigError if a requested path cannot run.

    `documents`: attention is restricted to documents and needs a mask. Builds the kernels if they are needed and not
    built yet, which takes half a minute and is reported to `log`.
    """
    library = load(device.type, log) if _wants_kernels(config, device) else Unavailable("no op uses them")
    return choose_ops(config, device, library, documents)


def choose_ops(
    config: OpsConfig, device: torch.device, library: LoadedLibrary | Unavailable, documents: bool = False
) -> Ops:
    """Return the ops for a device and these kernels. The device need not be on this machine. Raises ConfigError if a
    requested path cannot run."""
    here = _Selection(config, device, library, documents)
    linear, apex_norm = here.linear(), here.apex_norm()
    paths = {key: here.path(key) == "fused" for key in PLAIN if key not in here.chosen}
    cross_entropy = CrossEntropy(here.path("cross_entropy", otherwise="chunked"))
    attention = here.attention()
    # On a CPU, SDPA is requested only for comparison, so materialized scores keep the reference path.
    fused_scores = device.type != "cpu" and attention in SDPA and paths["dropout"]
    # On a CPU, the sums are not deferred, since the norms read them from the cache.
    deferred_add = device.type != "cpu" and paths.get("layer_norm", False)
    options: dict[str, Any] = {"linear": linear, "fused_scores": fused_scores, "deferred_add": deferred_add, **paths}
    options["table"], options["apex_norm"] = cross_entropy is CrossEntropy.fused, apex_norm
    options["weight_copies"] = device.type == "cuda" and paths["adamw"]
    options["varlen"] = documents and _has_flash(device, attention)
    return Ops(attention, cross_entropy, **options, chosen=tuple(here.chosen.items()))


def _has_flash(device: torch.device, attention: Attention) -> bool:
    """Return True if the GPU has flash attention (sm_80 or newer). A GPU on another machine is assumed to be new."""
    if device.type != "cuda" or attention is not Attention.sdpa:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _wants_kernels(config: OpsConfig, device: torch.device) -> bool:
    if config.implementation is not Implementation.reference:
        return True
    choices = (config.cross_entropy, config.linear, *(getattr(config, key) for key in PLAIN))
    kernel_attention = config.attention in (Attention.fused, Attention.fused_softmax)
    return kernel_attention or any(choice.value == "fused" for choice in choices)


@dataclass
class _Selection:
    """Selection in progress: configuration, device and kernels. `chosen` maps each op to its path and the reason."""

    config: OpsConfig
    device: torch.device
    library: LoadedLibrary | Unavailable
    documents: bool
    chosen: dict[str, str] = field(default_factory=dict)

    def path(self, key: str, otherwise: str = "reference") -> str:
        """Return the path of an op: `fused`, another requested one, or `otherwise` if there are no kernels."""
        own = getattr(self.config, key).value
        choice = self.config.implementation.value if own == "auto" else own
        if choice not in ("auto", "fused"):
            return self.say(key, choice, "asked for")
        asked = choice == "fused"
        if self.available(f"ops.{key}=fused" if own == "fused" else "ops=fused", asked):
            return self.say(key, "fused", self.kernels(asked))
        return self.say(key, otherwise, self.reason())

    def say(self, key: str, path: str, why: str) -> str:
        """Record an op's path, and return it."""
        self.chosen[key] = f"{path} ({why})"
        return path

    def available(self, key: str, wanted: bool) -> bool:
        """Return True if kernels can run. Raises ConfigError if they cannot although `key` requests them (`wanted`)."""
        if wanted and isinstance(self.library, Unavailable):
            raise ConfigError(f"{key}: {self.library.reason}; fix that, or use {key.partition('=')[0]}=auto")
        return isinstance(self.library, LoadedLibrary)

    def kernels(self, asked: bool = False) -> str:
        """Return a description of the kernels that run."""
        assert isinstance(self.library, LoadedLibrary)
        words = "CUDA kernels" if self.library.cuda else f"{self.library.isa} kernels"
        return f"asked for, {words}" if asked else words

    def reason(self) -> str:
        """Return the reason why no kernels run."""
        assert isinstance(self.library, Unavailable)
        return self.library.reason

    def apex_norm(self) -> bool:
        """Return True if layer norm is Apex's. Raises ConfigError if it is requested but cannot run."""
        if self.config.layer_norm is not LayerNormKernel.apex:
            return False
        if self.device.type != "cuda":
            raise ConfigError(
                f"ops.layer_norm=apex needs a GPU, but this runs on {self.device.type}; use ops.layer_norm=auto"
            )
        if reason := apex.why_not(apex.LAYER_NORM):
            raise ConfigError(f"ops.layer_norm=apex: {reason}, or use ops.layer_norm=auto")
        self.say("layer_norm", "apex", "asked for")
        return True

    def linear(self) -> bool:
        """Return True if the weight gradients of linear layers use the fused path. Raises ConfigError if it is
        requested but cannot run."""
        own = self.config.linear
        if Implementation.reference in (own, self.config.implementation) and own is not Implementation.fused:
            path = self.say("linear", "reference", "asked for")
        elif self.device.type == "cuda":
            path = self.say("linear", "fused", "weight gradients in fp32 by cuBLAS")
        else:
            path = self._linear_of_products(asked=own is Implementation.fused)
        return path == "fused"

    def _linear_of_products(self, asked: bool) -> str:
        """Return the path on devices other than GPUs: fused on a CPU whose kernels use bf16 instructions."""
        if not self.available("ops.linear=fused", asked):
            return self.say("linear", "reference", self.reason())
        assert isinstance(self.library, LoadedLibrary)
        on_cpu, needed = self.device.type == "cpu", "BF16" if "neon" in self.library.isa else "AVX512-BF16"
        if on_cpu and "_bf16" in self.library.isa:  # avx512_bf16, also of CPUs with AMX, or neon_bf16
            return self.say("linear", "fused", self.kernels(asked))
        lacks = f"this CPU has no {needed}" if on_cpu else f"this runs on {self.device.type}"
        if asked:
            raise ConfigError(f"ops.linear=fused needs a CPU with {needed}; {lacks}; use ops.linear=auto")
        return self.say("linear", "reference", lacks)

    def attention(self) -> Attention:
        """Return the attention to run. Raises ConfigError if the requested one cannot run."""
        choice, why = self.config.attention, "asked for"
        if choice is Attention.auto:
            choice, why = self._auto_attention()
            if self.documents and choice is Attention.fused:  # supports only the causal mask
                choice, why = Attention.fused_softmax, f"{why}; data.packing=documents needs a mask"
        else:
            self._refuse_attention(choice)
            if self.documents and choice not in MASKED:
                raise ConfigError(
                    f"ops.attention={choice.value} does not support masks, which data.packing=documents needs; use "
                    f"ops.attention=auto, {', '.join(each.value for each in MASKED)}, or data.packing=concatenate"
                )
        self.say("attention", choice.value, why)
        return choice

    def _auto_attention(self) -> tuple[Attention, str]:
        if self.device.type != "cpu":
            return Attention.sdpa, "torch selects the kernel"
        if self.config.implementation is Implementation.reference:
            return Attention.matmul, "reference asked for"
        if self.available("ops=fused", self.config.implementation is Implementation.fused):
            return Attention.fused, self.kernels()
        return Attention.matmul, "batched matmuls are faster than SDPA on a CPU"

    def _refuse_attention(self, choice: Attention) -> None:
        """Raise ConfigError for an attention that cannot run here."""
        key, device = f"ops.attention={choice.value}", self.device
        if choice in (Attention.fused, Attention.fused_softmax):
            self.available(key, True)
        if choice is Attention.fused and device.type != "cpu":
            raise ConfigError(f"{key} is for CPUs; on {device.type} use ops.attention=auto, sdpa, cudnn or fa3")
        if choice not in (Attention.cudnn, Attention.fa3):
            return
        if device.type != "cuda":
            raise ConfigError(f"{key} needs a GPU, but this runs on {device.type}; use ops.attention=auto")
        if choice is Attention.cudnn and not torch.backends.cudnn.is_available():
            raise ConfigError(f"{key}: this build of torch has no cuDNN; use ops.attention=auto")
        if choice is Attention.fa3:
            if torch.cuda.get_device_capability(device)[0] != 9:
                raise ConfigError(f"{key} needs an sm_90 GPU (H100, H200); use ops.attention=auto")
            if find_spec("flash_attn_interface") is None:
                raise ConfigError(
                    f"{key}: the package flash_attn_3 is not installed; install it, or use ops.attention=auto"
                )
            torch.nn.attention.activate_flash_attention_impl("FA3")
