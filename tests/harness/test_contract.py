"""The adapter's part of lm-eval's contract, recorded, for environments without lm-eval; and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models.toy import ConvSpec, config_of
from torch import nn

from gptlite.commands.eval import check, laid_out
from gptlite.commands.eval_arguments import Arguments
from gptlite.errors import ConfigError
from gptlite.models.capabilities import Sampling
from gptlite.models.model import Model
from gptlite.models.plain import keep_blocks
from gptlite.models.scores import scores
from gptlite.models.spec import ModelSpec
from gptlite.ops.inputs import IGNORE, Inputs
from gptlite.satellites.harness.scorer import Prompt, Scored, Scorer
from gptlite.trainer.restore import restore
from harness.models import PAIRS, saved


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> Scorer:
    found = restore(str(saved(tmp_path_factory.mktemp("gpt"), "gpt2")), "fp32")
    return Scorer(found.model, found.runner, found.tokenizer, 3, print)


def test_scores_are_sums_of_log_probabilities_of_the_last_tokens(scorer):
    """As lm-eval defines them: (context, continuation) to the sum over the continuation, and if greedy writes it."""
    tokenizer, (part,) = scorer.tokenizer, scorer.runner.parts
    scored = []
    for context, continuation in PAIRS[:4]:
        start, end = tokenizer.encode(context) or [tokenizer.eod], tokenizer.encode(continuation)
        scored.append(Scored(start + end, len(end)))
    found = scorer.score(scored)
    for (tokens, count), (nats, greedy) in zip(scored, found, strict=True):
        with torch.no_grad():
            log_p = [part(torch.tensor([tokens[:end]]), None).log_softmax(-1)[0] for end in range(1, len(tokens))]
        last = list(zip(log_p, tokens[1:], strict=True))[-count:]
        assert nats == pytest.approx(sum(float(p[token]) for p, token in last), abs=1e-4)
        assert greedy == all(int(p.argmax()) == token for p, token in last)


def test_the_batch_changes_no_score(scorer):
    requests = [Scored(list(range(3, 3 + length)), 1 + length // 3) for length in (2, 30, 7, 19, 4, 11, 33)]
    alone = [scorer.score([each])[0] for each in requests]
    assert [nats for nats, _ in scorer.score(requests)] == pytest.approx([nats for nats, _ in alone], abs=1e-4)


def test_a_text_ends_before_the_first_of_its_ends(scorer):
    prompt = Prompt(scorer.tokenizer.encode("The cat"), 20, (), Sampling(temperature=0))
    (text,) = scorer.generate([prompt])
    ends = (text[9:11], text[4:6])
    (cut,) = scorer.generate([prompt._replace(until=ends)])
    assert cut == text[: min(text.find(end) for end in ends)]
    assert len(text) > 11


class Bigram(ModelSpec):
    name = "bigram"


def test_a_plain_module_that_gives_logits_is_scored():
    torch.manual_seed(0)
    part, tokens = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)), torch.tensor([[1, 2, 3], [4, 5, 6]])
    targets = torch.tensor([[2, 3, IGNORE], [5, 6, 0]])
    with torch.no_grad():
        found, logits = scores(Model(Bigram(), None), part, tokens, Inputs(targets)), part(tokens)
    expected = -nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(found[..., 0].flatten(), expected)
    assert found[..., 1].tolist() == ((logits.argmax(-1) == targets) & (targets != IGNORE)).float().tolist()


def test_a_model_without_logits_is_refused_by_name():
    model, bigram = Model(ConvSpec(), config_of("data.vocab_size=9").model), Model(Bigram(), None)
    with pytest.raises(ConfigError, match=r"the conv model returns no token logits.* define its `scores` too"):
        scores(model, nn.Identity(), torch.zeros(1, 2), Inputs(torch.zeros(1, 2, dtype=torch.int64)))
    with pytest.raises(ConfigError, match=r"the bigram model returns no token logits.* its output is \(2, 5\)"):
        scores(bigram, nn.Embedding(7, 5), torch.tensor([1, 2]), Inputs(torch.zeros(1, 2, dtype=torch.int64)))


def test_scores_are_fp32_under_autocast_and_activations_are_not():
    model, tokens = Model(Bigram(), None, torch.bfloat16, torch.bfloat16), torch.tensor([[1, 2, 3]])
    part = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    assert scores(model, part, tokens, Inputs(tokens)).dtype == torch.float32
    keep_blocks(part, range(1))
    assert scores(model, part, tokens, Inputs(tokens)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"limit": 3}, "limit=3 requires tasks; give tasks=NAME,NAME"),
        ({"tasks": "a", "samples": 3}, "samples=3 is for texts only"),
        ({"tasks": " , "}, "give names of tasks"),
        ({"tasks": "a", "limit": 0}, "limit=0"),
        ({"tasks": "a", "num_fewshot": -1}, "num_fewshot=-1"),
        ({"tasks": "a", "include_path": "nowhere"}, "include_path=nowhere is not a folder"),
        ({"tasks": "a", "output": __file__}, "exists; give a new file"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        check(Arguments(checkpoint="a", **given))


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("gptlite.commands.eval.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tasks=a needs lm-eval; pip install 'gptlite\[eval\]'"):
        check(Arguments(checkpoint="a", tasks="a"))


@pytest.mark.slow
def test_bits_per_byte_on_two_ranks_are_those_of_one(run, tmp_path: Path):
    assert run("a", "trainer.max_steps=2")[0] == 0
    tool = [sys.executable, "-m", "gptlite", "eval", f"checkpoint={tmp_path / 'a'}", "precision=fp32"]
    more = ([], ["parallelism=tp2"])
    one, two = (subprocess.run([*tool, *each], capture_output=True, text=True, timeout=200) for each in more)
    assert two.returncode == 0, two.stderr
    assert two.stdout.splitlines()[-2] == one.stdout.splitlines()[-2]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("parallelism.tensor=3", "is not divisible by parallelism.tensor=3"),
        ("parallelism.tensr=2", "tensr"),
        ("parallelism=auto", "parallelism=auto plans a training run"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path, layout: str, words: str):
    with pytest.raises(ConfigError, match=words):
        laid_out(Arguments(checkpoint=str(saved(tmp_path, "gpt2"))), [layout], None)
