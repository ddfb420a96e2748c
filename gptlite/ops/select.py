"""Which implementation of each op a model uses, decided once and said in the banner."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from gptlite.errors import ConfigError
from gptlite.kernels.library import Loaded, Unavailable, load
from gptlite.ops import apex
from gptlite.ops.config import Attention, CrossEntropy, Implementation, LayerNorm, OpsConfig

BF16_PRODUCTS = "avx512_bf16"  # of a CPU; one with AMX has it too
MASKED = (Attention.sdpa, Attention.fused_softmax, Attention.matmul)  # attention that can keep to documents
SDPA = (Attention.sdpa, Attention.cudnn, Attention.fa3)
# The keys whose choice is between our kernel and a reference.
PLAIN = ("layer_norm", "bias_gelu", "dropout", "adamw")


@dataclass(frozen=True)
class Ops:
    """The chosen path of each op, True for the kernel, with the reasons: `attention fused (...)`."""

    attention: Attention = Attention.matmul
    cross_entropy: CrossEntropy = CrossEntropy.chunked
    layer_norm: bool = False
    bias_gelu: bool = False
    dropout: bool = False
    linear: bool = False
    fused_scores: bool = False  # attention that drops or masks beside SDPA writes its scores out through the kernels
    deferred_add: bool = False  # a block's last sum and its biases are left to the layer norm kernel that follows
    varlen: bool = False  # documents are kept apart by flash attention of spans, where nothing is dropped
    adamw: bool = False
    table: bool = False  # a tied embedding takes the head's gradient instead of adding its own, dense one
    weight_copies: bool = False  # weights have 16-bit copies that AdamW's kernel writes; else each forward pass casts
    apex_norm: bool = False  # layer norm by Apex; `layer_norm` is then False
    reasons: tuple[str, ...] = ()


def select_ops(
    config: OpsConfig, device: torch.device, log: Callable[[str], None] = print, documents: bool = False
) -> Ops:
    """The ops that run on a device. Raises ConfigError where a path asked for cannot run. `documents`: attention is to
    keep to documents, and needs a mask.

    Builds the kernels where they are wanted and not built yet, which takes half a minute and is told to `log`.
    """
    library = load(device.type, log) if _wants_kernels(config, device) else Unavailable("nothing asks for them")
    return choose_ops(config, device, library, documents)


def choose_ops(config: OpsConfig, device: torch.device, library: Loaded | Unavailable, documents: bool = False) -> Ops:
    """The ops that run on a device with these kernels; the device itself need not be here. Raises ConfigError."""
    chosen: dict[str, str] = {}
    linear = _linear(config, device, library, chosen)
    apex_norm = _apex_norm(config, device, chosen)
    paths = {key: _plain(config, key, library, chosen) for key in PLAIN if key not in chosen}
    cross_entropy = _cross_entropy(config, library, chosen)
    attention = _attention(config, device, library, chosen, documents)
    words = tuple(_words(chosen))
    table = device.type == "cpu" and cross_entropy is CrossEntropy.fused
    # A CPU asked for SDPA by name keeps the reference: it is there to compare with.
    fused_scores = device.type != "cpu" and attention in SDPA and paths["dropout"]
    # A CPU keeps the sums apart: its norms follow from the cache.
    deferred_add = device.type != "cpu" and paths.get("layer_norm", False)
    options = {"linear": linear, "fused_scores": fused_scores, "deferred_add": deferred_add, "table": table}
    options |= {"weight_copies": device.type == "cuda" and paths["adamw"], "apex_norm": apex_norm, **paths}
    options["varlen"] = documents and _has_flash(device, attention)
    return Ops(attention, cross_entropy, **options, reasons=words)


def _has_flash(device: torch.device, attention: Attention) -> bool:
    """Whether a GPU has flash attention, as all since sm_80 have; one that is not here is taken to be new."""
    if device.type != "cuda" or attention is not Attention.sdpa:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _words(chosen: dict[str, str]) -> Iterable[str]:
    """`a, b fused (why)`: each path once, with the ops that take it."""
    paths: dict[str, list[str]] = {}
    for op, path in chosen.items():
        paths.setdefault(path, []).append(op)
    for path, names in paths.items():
        yield f"{', '.join(names)} {path}"


def _wants_kernels(config: OpsConfig, device: torch.device) -> bool:
    if config.implementation is not Implementation.reference:
        return True
    choices = (config.cross_entropy, config.linear, *(getattr(config, key) for key in PLAIN))
    kernel_attention = config.attention in (Attention.fused, Attention.fused_softmax)
    return kernel_attention or any(choice.value == "fused" for choice in choices)


def _available(key: str, wanted: bool, library: Loaded | Unavailable) -> bool:
    """Whether a kernel can run. Raises ConfigError if not and it is `wanted`, asked for by name."""
    if isinstance(library, Loaded):
        return True
    if wanted:
        raise ConfigError(f"{key}: {library.reason}; mend that, or use {key.partition('=')[0]}=auto")
    return False


def _apex_norm(config: OpsConfig, device: torch.device, chosen: dict[str, str]) -> bool:
    if config.layer_norm is not LayerNorm.apex:
        return False
    if device.type != "cuda":
        raise ConfigError(f"ops.layer_norm=apex needs a GPU, and this runs on {device.type}; use ops.layer_norm=auto")
    if reason := apex.why_not(apex.LAYER_NORM):
        raise ConfigError(f"ops.layer_norm=apex: {reason}, or use ops.layer_norm=auto")
    chosen["layer_norm"] = "apex (asked for)"
    return True


def _plain(config: OpsConfig, key: str, library: Loaded | Unavailable, chosen: dict[str, str]) -> bool:
    own = Implementation(getattr(config, key).value)
    choice = config.implementation if own is Implementation.auto else own
    if choice is Implementation.reference:
        chosen[key] = "reference (asked for)"
        return False
    fused = _available(_asked(config, key), choice is Implementation.fused, library)
    chosen[key] = _fused_words(choice is Implementation.fused, library) if fused else _why_not(library)
    return fused


def _linear(config: OpsConfig, device: torch.device, library: Loaded | Unavailable, chosen: dict[str, str]) -> bool:
    own, isa = config.linear, library.isa if isinstance(library, Loaded) and device.type == "cpu" else ""
    if device.type == "cuda" and not (own is Implementation.auto and config.implementation is Implementation.reference):
        fused = own is not Implementation.reference
        chosen["linear"] = "fused (weight gradients in fp32 by cuBLAS)" if fused else "reference (asked for)"
        return fused
    if own is Implementation.fused:
        _available("ops.linear=fused", True, library)
        if BF16_PRODUCTS not in isa:
            raise ConfigError(f"ops.linear=fused needs a CPU with AVX512-BF16; {_lacks(device)}; use ops.linear=auto")
    elif own is Implementation.reference or config.implementation is Implementation.reference:
        chosen["linear"] = "reference (asked for)"
        return False
    if BF16_PRODUCTS in isa:
        chosen["linear"] = _fused_words(own is Implementation.fused, library)
        return True
    chosen["linear"] = f"reference ({_lacks(device)})" if isinstance(library, Loaded) else _why_not(library)
    return False


def _lacks(device: torch.device) -> str:
    return "this CPU has no AVX512-BF16" if device.type == "cpu" else f"this runs on {device.type}"


def _asked(config: OpsConfig, key: str) -> str:
    """The override that asked for a kernel."""
    return f"ops.{key}=fused" if getattr(config, key).value == "fused" else "ops=fused"


def _fused_words(asked: bool, library: Loaded | Unavailable) -> str:
    return f"fused ({'asked for, ' if asked else ''}{_kernel_words(library)})"


def _kernel_words(library: Loaded | Unavailable) -> str:
    assert isinstance(library, Loaded)
    return "CUDA kernels" if library.cuda else f"{library.isa} kernels"


def _why_not(library: Loaded | Unavailable) -> str:
    assert isinstance(library, Unavailable)
    return f"reference ({library.reason})"


def _cross_entropy(config: OpsConfig, library: Loaded | Unavailable, chosen: dict[str, str]) -> CrossEntropy:
    choice = config.cross_entropy
    if choice is CrossEntropy.auto and config.implementation is not Implementation.auto:
        choice = CrossEntropy(config.implementation.value)
    if choice in (CrossEntropy.reference, CrossEntropy.chunked):
        chosen["cross_entropy"] = f"{choice.value} (asked for)"
        return choice
    asked = choice is CrossEntropy.fused
    if _available(_asked(config, "cross_entropy"), asked, library):
        chosen["cross_entropy"] = _fused_words(asked, library)
        return CrossEntropy.fused
    chosen["cross_entropy"] = _why_not(library).replace("reference", "chunked", 1)
    return CrossEntropy.chunked


def _attention(
    config: OpsConfig,
    device: torch.device,
    library: Loaded | Unavailable,
    chosen: dict[str, str],
    documents: bool,
) -> Attention:
    choice, why = config.attention, "asked for"
    if choice is Attention.auto:
        choice, why = _auto_attention(config, device, library)
        if documents and choice is Attention.fused:  # it knows no mask but the causal one
            choice, why = Attention.fused_softmax, f"{why}; data.packing=documents needs a mask"
    else:
        _refuse_attention(choice, device, library)
        if documents and choice not in MASKED:
            raise ConfigError(
                f"ops.attention={choice.value} has no mask, which data.packing=documents needs; use "
                f"ops.attention=auto, {', '.join(each.value for each in MASKED)}, or data.packing=concatenate"
            )
    chosen["attention"] = f"{choice.value} ({why})"
    return choice


def _auto_attention(config: OpsConfig, device: torch.device, library: Loaded | Unavailable) -> tuple[Attention, str]:
    if device.type != "cpu":
        return Attention.sdpa, "torch picks the kernel"
    asked = config.implementation is Implementation.fused
    if config.implementation is Implementation.reference:
        return Attention.matmul, "reference asked for"
    if _available("ops=fused", asked, library):
        return Attention.fused, _kernel_words(library)
    return Attention.matmul, "batched matmuls are faster than SDPA on a CPU"


def _refuse_attention(choice: Attention, device: torch.device, library: Loaded | Unavailable) -> None:
    """Raises ConfigError for an attention that cannot run on a device."""
    key = f"ops.attention={choice.value}"
    if choice in (Attention.fused, Attention.fused_softmax):
        _available(key, True, library)
    if choice is Attention.fused and device.type != "cpu":
        raise ConfigError(f"{key} is for CPUs; on {device.type} use ops.attention=auto, sdpa, cudnn or fa3")
    if choice not in (Attention.cudnn, Attention.fa3):
        return
    if device.type != "cuda":
        raise ConfigError(f"{key} needs a GPU, and this runs on {device.type}; use ops.attention=auto")
    if choice is Attention.cudnn and not torch.backends.cudnn.is_available():
        raise ConfigError(f"{key}: this torch has no cuDNN; use ops.attention=auto")
    if choice is Attention.fa3:
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise ConfigError(f"{key} needs an sm_90 GPU (H100, H200); use ops.attention=auto")
        if find_spec("flash_attn_interface") is None:
            raise ConfigError(
                f"{key}: the package flash_attn_3 is not installed; install it, or use ops.attention=auto"
            )
        torch.nn.attention.activate_flash_attention_impl("FA3")
