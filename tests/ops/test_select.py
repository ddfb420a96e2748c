"""Which path runs, and what is said about it."""

from dataclasses import fields, replace

import pytest
import torch

from gptlite.errors import ConfigError
from gptlite.kernels.library import LoadedLibrary, Unavailable
from gptlite.ops import select
from gptlite.ops.config import Attention, CrossEntropy, Implementation, LayerNormKernel, OpsConfig
from gptlite.ops.select import PLAIN, Ops, select_ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFERENCE = OpsConfig(Implementation.reference)
OF_A_GPU = ("fused_scores", "deferred_add", "varlen", "weight_copies")


def with_isa(monkeypatch, isa):
    found = LoadedLibrary(path=None, cuda=False, isa=isa, seconds=1.0, cached=True, why_no_cuda="")
    monkeypatch.setattr(select, "load", lambda device, log: replace(found, cuda=device == "cuda"))


@pytest.fixture
def with_kernels(monkeypatch):
    with_isa(monkeypatch, "avx512")


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(select, "load", lambda device, log: Unavailable("no C++ compiler on PATH"))


def paths(ops: Ops) -> dict:
    return {
        field.name: getattr(ops, field.name)
        for field in fields(ops)
        if field.name not in ("chosen", "note", "apex_norm")
    }


def test_auto_takes_the_kernels_where_they_load(with_kernels):
    ops = select_ops(OpsConfig(), CPU)
    plain = dict.fromkeys((*PLAIN, "table"), True) | dict.fromkeys(("linear", *OF_A_GPU), False)
    assert paths(ops) == {"attention": Attention.fused, "cross_entropy": CrossEntropy.fused, **plain}
    assert "avx512 kernels" in ", ".join(ops.reasons)
    cuda = select_ops(OpsConfig(), CUDA)
    assert (cuda.attention, cuda.table, cuda.weight_copies) == (Attention.sdpa, True, True)


def test_auto_without_kernels_is_the_reference_and_says_why(without_kernels):
    ops = select_ops(OpsConfig(), CPU)
    plain = dict.fromkeys((*PLAIN, "linear", "table", *OF_A_GPU), False)
    assert paths(ops) == {"attention": Attention.matmul, "cross_entropy": CrossEntropy.chunked, **plain}
    assert sum("no C++ compiler on PATH" in reason for reason in ops.reasons) == 2  # the loss's path has its own name


def test_the_reference_loads_nothing(monkeypatch):
    monkeypatch.setattr(select, "load", None)
    ops = select_ops(REFERENCE, CPU)
    assert ops.cross_entropy is CrossEntropy.reference
    assert not any(getattr(ops, key) for key in PLAIN)


@pytest.mark.parametrize("key", PLAIN)
def test_one_op_may_differ_from_the_rest(with_kernels, key):
    kind = LayerNormKernel if key == "layer_norm" else Implementation
    ops = select_ops(replace(REFERENCE, **{key: kind.fused}), CPU)
    assert [name for name in PLAIN if getattr(ops, name)] == [key]
    ops = select_ops(replace(OpsConfig(), **{key: kind.reference}), CPU)
    assert [name for name in PLAIN if not getattr(ops, name)] == [key]


@pytest.mark.parametrize("key", [*PLAIN, "linear", "cross_entropy", "attention"])
def test_a_kernel_asked_for_by_name_that_cannot_run_is_refused(without_kernels, key):
    kinds = {"cross_entropy": CrossEntropy, "attention": Attention, "layer_norm": LayerNormKernel}
    kind = kinds.get(key, Implementation)
    with pytest.raises(ConfigError, match=rf"^ops\.{key}=fused: no C\+\+ compiler on PATH; .*ops\.{key}=auto$"):
        select_ops(replace(OpsConfig(), **{key: kind.fused}), CPU)


@pytest.mark.parametrize("isa", ["avx512 avx512_bf16 amx_bf16", "avx512 avx512_bf16", "neon neon_bf16"])
def test_linear_layers_are_fused_where_there_are_products_of_bf16(monkeypatch, isa):
    with_isa(monkeypatch, isa)
    assert select_ops(OpsConfig(), CPU).linear
    assert select_ops(OpsConfig(Implementation.fused), CPU).linear
    assert select_ops(replace(REFERENCE, linear=Implementation.fused), CPU).linear
    assert not select_ops(REFERENCE, CPU).linear
    assert not select_ops(OpsConfig(linear=Implementation.reference), CPU).linear


@pytest.mark.parametrize("there", ["with_kernels", "without_kernels"])
def test_a_gpus_linear_layers_need_no_kernel(request, there):
    request.getfixturevalue(there)
    ops = select_ops(OpsConfig(), CUDA)
    assert ops.linear
    assert "linear fused (weight gradients in fp32 by cuBLAS)" in ops.reasons
    assert select_ops(OpsConfig(linear=Implementation.fused), CUDA).linear
    assert select_ops(replace(REFERENCE, linear=Implementation.fused), CUDA).linear
    assert not select_ops(REFERENCE, CUDA).linear
    assert not select_ops(REFERENCE, CUDA).weight_copies
    assert not select_ops(OpsConfig(linear=Implementation.reference), CUDA).linear


def test_linear_layers_are_not_fused_without_products_of_bf16(with_kernels):
    ops = select_ops(OpsConfig(Implementation.fused), CPU)
    assert "linear reference (this CPU has no AVX512-BF16)" in ops.reasons
    with pytest.raises(
        ConfigError, match=r"^ops.linear=fused needs a CPU with AVX512-BF16; this CPU has no AVX.*=auto$"
    ):
        select_ops(OpsConfig(linear=Implementation.fused), CPU)


def test_on_arm_the_banner_names_neon_and_what_falls_back(monkeypatch):
    with_isa(monkeypatch, "neon")
    ops = select_ops(OpsConfig(), CPU)
    assert ops.reasons[0] == "linear reference (this CPU has no BF16)"
    fused, _, why = ops.reasons[1].partition(" fused ")
    assert (set(fused.split(", ")) >= {*PLAIN, "attention", "cross_entropy"}, why) == (True, "(neon kernels)")
    with pytest.raises(ConfigError, match=r"^ops.linear=fused needs a CPU with BF16; this CPU has no BF16; .*=auto$"):
        select_ops(OpsConfig(linear=Implementation.fused), CPU)


def test_all_kernels_asked_for_are_refused_together(without_kernels):
    with pytest.raises(ConfigError, match=r"^ops=fused: no C\+\+ compiler on PATH; .*ops=auto$"):
        select_ops(OpsConfig(Implementation.fused), CPU)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("choice", [Attention.matmul, Attention.sdpa, Attention.fused_softmax])
def test_the_attention_asked_for_runs(with_kernels, choice, device):
    ops = select_ops(OpsConfig(attention=choice), device)
    assert ops.attention is choice
    assert f"attention {choice.value} (asked for)" in ops.reasons


@pytest.mark.parametrize(
    ("choice", "device", "words"),
    [
        (Attention.cudnn, CPU, "ops.attention=cudnn needs a GPU"),
        (Attention.fa3, CPU, "ops.attention=fa3 needs a GPU"),
        (Attention.fused, CUDA, r"ops\.attention=fused is for CPUs"),
    ],
)
def test_attention_of_another_device_is_refused(with_kernels, choice, device, words):
    with pytest.raises(ConfigError, match=words):
        select_ops(OpsConfig(attention=choice), device)


def test_dropout_of_attention_takes_the_kernels_on_a_gpu(with_kernels):
    assert select_ops(OpsConfig(), CUDA).fused_scores
    assert not select_ops(OpsConfig(dropout=Implementation.reference), CUDA).fused_scores
    assert not select_ops(OpsConfig(attention=Attention.matmul), CUDA).fused_scores
    assert not select_ops(OpsConfig(attention=Attention.sdpa), CPU).fused_scores


def test_a_gpus_layer_norm_adds_what_is_left_to_it(with_kernels):
    assert select_ops(OpsConfig(), CUDA).deferred_add
    assert not select_ops(OpsConfig(layer_norm=LayerNormKernel.reference), CUDA).deferred_add
    assert not select_ops(OpsConfig(), CPU).deferred_add


def test_documents_need_an_attention_with_a_mask(with_kernels):
    ops = select_ops(OpsConfig(), CPU, documents=True)
    assert ops.attention is Attention.fused_softmax
    assert "fused_softmax (avx512 kernels; data.packing=documents needs a mask)" in ", ".join(ops.reasons)
    assert select_ops(OpsConfig(), CUDA, documents=True).attention is Attention.sdpa
    assert select_ops(REFERENCE, CPU, documents=True).attention is Attention.matmul
    assert select_ops(OpsConfig(), CUDA, documents=True).varlen
    assert not select_ops(OpsConfig(), CUDA).varlen
    assert not select_ops(OpsConfig(attention=Attention.sdpa), CPU, documents=True).varlen
    assert not select_ops(OpsConfig(attention=Attention.fused_softmax), CUDA, documents=True).varlen
    with pytest.raises(ConfigError, match=r"ops\.attention=fused does not support masks, which data\.packing"):
        select_ops(OpsConfig(attention=Attention.fused), CPU, documents=True)
