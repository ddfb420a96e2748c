"""Sampling: the cache changes nothing, each cut of the distribution does what it says, a seed repeats."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from models.conftest import CHOICES, MODERN, VALUES, build

from gptlite.models.capabilities import Sampling
from gptlite.models.gpt.cache import LayerCache
from gptlite.models.gpt.config import MoEConfig, Norm, Position
from gptlite.models.gpt.generate import _draw, generate
from gptlite.ops.select import Ops

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.0, top_p=0.9, top_k=20, seed=4)
PROMPT = [5, 17, 3]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [16, 7, 1], ids="length_{}".format)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 9], ids=["short_prompt", "prompt_past_the_context"])
def test_the_cache_changes_no_token(tiny, sampling, length, prompt):
    """Far past the context length, whose older half is dropped each time it is full."""
    model = tiny(sequence_length=length).eval()
    cached = list(generate(model, prompt, 50, sampling))
    assert cached == list(generate(model, prompt, 50, sampling, cache=False))
    assert len(cached) == 50
    assert len(set(cached)) > 3 or length == 1  # one position: a token may well be its own successor


CACHED: list[tuple[Ops, dict[str, Any]]] = [
    (Ops(rope=True), {"position": Position.rope, "norm": Norm.rms_norm, "qk_norm": True, "bias": False}),
    (Ops(layer_norm=True, activation=True, dropout=True, deferred_add=True), {}),
    (Ops(), VALUES | {"num_layers": 3}),
    (Ops(), VALUES | MODERN | {"num_layers": 3}),
    (Ops(), {"bias": False, "moe": MoEConfig(experts=8, top_k=2, d_ff=16)}),
    *((Ops(choice), MODERN | {"windows": [3, 0]}) for choice in CHOICES),
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("ops", "overrides"), CACHED, ids=str)
def test_caches_give_the_whole_sequence(ops, overrides):
    """Some positions at once, then one after the other; the whole is the reference's."""
    model, reference = build(ops=ops, **overrides).eval(), build(**overrides).eval()
    tokens = torch.randint(53, (2, 16), generator=torch.Generator().manual_seed(0))
    caches = [LayerCache(16) for _ in model.layers]
    with torch.no_grad():
        for start, end in pairwise((0, *range(5, 17))):
            logits = model(tokens[:, start:end], None, caches=caches)
            torch.testing.assert_close(logits, reference(tokens[:, :end], None), rtol=1e-5, atol=1e-5)


def test_the_cache_reads_each_token_once(tiny):
    model, lengths = tiny().eval(), []
    model.token_embedding.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    list(generate(model, PROMPT, 13 + 1 + 8, GREEDY))
    # 3 + 13 fill the 16 positions; then 8 of the 17 tokens are read anew, and so on.
    assert lengths == [3] + [1] * 13 + [8] + [1] * 7


def test_greedy_takes_the_likeliest_of_the_whole_context(tiny):
    model = tiny().eval()
    tokens = PROMPT + list(generate(model, PROMPT, 13, GREEDY))
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([tokens]), None)
        likeliest = (hidden @ model.head.weight[:53].T).argmax(-1)[0].tolist()
    assert likeliest[2:-1] == tokens[3:]


def test_padded_vocabulary_is_never_drawn(tiny):
    model = tiny().eval()
    with torch.no_grad():
        model.head.weight[53:] = 100 * model.head.weight[:1]
    assert max(generate(model, PROMPT, 200, Sampling(temperature=100.0, top_p=1.0))) < 53


def test_the_seed_decides(tiny):
    model = tiny().eval()

    def tokens(seed):
        return list(generate(model, PROMPT, 40, Sampling(temperature=1.0, seed=seed)))

    torch.manual_seed(0)
    first = tokens(1)
    torch.manual_seed(99)
    assert tokens(1) == first
    assert tokens(2) != first


@pytest.mark.parametrize("cut", [{"top_k": 1, "top_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str)
def test_cuts_that_leave_one_token_are_greedy(tiny, cut):
    model = tiny().eval()
    sampling = Sampling(**{"temperature": 1.0, "seed": 8} | cut)
    assert list(generate(model, PROMPT, 40, sampling)) == list(generate(model, PROMPT, 40, GREEDY))


P = [0.5, 0.2, 0.15, 0.1, 0.05]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0, 0, 1.0), P),
        (Sampling(1.0, 2, 1.0), [5 / 7, 2 / 7, 0, 0, 0]),
        (Sampling(1.0, 99, 1.0), P),
        (Sampling(1.0, 0, 0.6), [5 / 7, 2 / 7, 0, 0, 0]),  # 0.5 alone does not reach 0.6
        (Sampling(1.0, 0, 0.45), [1, 0, 0, 0, 0]),
        (Sampling(0.5, 0, 1.0), [p**2 / sum(q**2 for q in P) for p in P]),
        (Sampling(1.0, 3, 0.9), [50 / 85, 20 / 85, 15 / 85, 0, 0]),
        (Sampling(0.0), [1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probabilities(sampling, expected):
    draws, order = 3000, [3, 0, 4, 1, 2]  # the likeliest token is not the first
    logits = torch.tensor([math.log(P[rank]) for rank in order])
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(
        torch.tensor([_draw(logits, sampling, generator) for _ in range(draws)]), minlength=5
    ).tolist()
    for token, rank in enumerate(order):
        p = expected[rank]
        assert abs(counts[token] - draws * p) <= 5 * math.sqrt(draws * p * (1 - p))


def test_the_stop_token_ends_and_is_not_given_out(tiny):
    model = tiny().eval()
    tokens = list(generate(model, PROMPT, 40, SAMPLED))
    stop = tokens[10]
    assert list(generate(model, PROMPT, 40, SAMPLED, stop=stop)) == tokens[: tokens.index(stop)]
    assert list(generate(model, PROMPT, 0, SAMPLED)) == []


def test_no_gradient_and_no_mode_is_left_behind(tiny):
    model = tiny(dropout=0.5)
    tokens = generate(model, PROMPT, 5, GREEDY)
    next(tokens)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert list(generate(model, PROMPT, 5, GREEDY)) == list(generate(model.eval(), PROMPT, 5, GREEDY))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"temperature": -0.1}, "temperature=-0.1"), ({"top_k": -1}, "top_k=-1"), ({"top_p": 0.0}, "top_p=0.0"),
     ({"top_p": 1.5}, "top_p=1.5")],
)  # fmt: skip
def test_wrong_sampling_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)


def test_an_empty_prompt_is_refused(tiny):
    with pytest.raises(ValueError, match="the prompt is empty"):
        next(generate(tiny(), [], 5, GREEDY))


def test_a_layer_cache_returns_all_keys_so_far_and_refuses_more_than_fit():
    k, v = torch.randn(2, 2, 3, 7, 4).unbind(0)
    cache = LayerCache(7)
    for start, end in pairwise((0, 3, 4, 7)):
        keys, values = cache.append(k[:, :, start:end], v[:, :, start:end])
        assert torch.equal(keys, k[:, :, :end])
        assert torch.equal(values, v[:, :, :end])
        assert cache.length == end
    with pytest.raises(ValueError, match="8 tokens do not fit into a KV cache of 7"):
        cache.append(k[:, :, :1], v[:, :, :1])
