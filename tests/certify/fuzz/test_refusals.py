"""Refusals met by draws are as they should be, and a message that is not is found."""

import pytest

from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.launch.launcher import check_here
from gptlite.satellites.certify.fuzz import refusals
from gptlite.satellites.certify.fuzz.axes import BASE, overrides, replaced
from gptlite.satellites.certify.fuzz.draw import Drawing
from gptlite.satellites.certify.fuzz.legal import refusal
from gptlite.satellites.certify.fuzz.refusals import applied, cause, complaint, fixes


def test_the_refusals_that_draws_meet_name_key_value_and_a_fix_that_mends_them():
    drawing = Drawing(seed=3)
    for number, _ in enumerate(drawing):
        if number == 80:
            break
    assert len(drawing.refused) > 25
    complaints = {reason: complaint(overrides(draw)) for reason, draw in drawing.refused.items()}
    assert {reason: text for reason, text in complaints.items() if text} == {}


MESSAGES = {
    "a=1 is wrong; use parallelism.context=1": [("parallelism.context=1",)],
    "a=1 is wrong; try b.c=1, 2, 4, or d.e=248 or 256": [
        *(("b.c=2",), ("b.c=4",), ("b.c=1",)),
        *(("d.e=256",), ("d.e=248",)),
    ],
    "a=1 is wrong; use p.zero=3, or z.w=none z.s=false": [("p.zero=3",), ("z.w=none", "z.s=false")],
    "p.s=zbv is wrong; use p.s=1f1b or interleaved_1f1b, or t.n=false": [
        *(("p.s=interleaved_1f1b",), ("p.s=1f1b",)),
        ("t.n=false",),
    ],
    "p.o=true is wrong; leave it out, or use p.offload=nvme": [("p.offload=nvme",), ("p.o~",)],
    "a=1 is wrong; use p.r=1, which shards over all data ranks": [("p.r=1",)],
    "a=1 is wrong; m.kv can be 1, 2": [("m.kv=2",), ("m.kv=1",)],
    "a=1 is wrong; use more data ranks": [],
}


@pytest.mark.parametrize("message", MESSAGES)
def test_fixes_are_read_from_the_message(message):
    assert list(fixes(message)) == MESSAGES[message]


def test_a_fix_replaces_values_and_a_preset_takes_keys_with_it_that_it_lacks():
    values = replaced(["optimizer=sgd", "optimizer.nesterov=true", "parallelism.tensor=2"])
    after = applied(values, ("optimizer=adamw", "parallelism.tensor=1", "parallelism.zero~"))
    assert {"optimizer=adamw", "parallelism.tensor=1", "optimizer.lr=1e-3"} <= set(after)
    assert not any(each.startswith("optimizer.nesterov") for each in after)
    assert not any(each.startswith("data.vocab_size") for each in applied(values, ("data.vocab_size~",)))


PLANTED = {
    "two lines": ("parallelism.tensor=3 is wrong;\nuse parallelism.tensor=1", "more than one line"),
    "no value": ("the degree is wrong; use parallelism.tensor=1", "no key with its value"),
    "another key": ("model.other=3 is wrong; use model.other=1", "no key that was given"),
    "no fix": ("parallelism.tensor=3 is wrong", "no fix"),
    "a fix that does not mend it": (
        "parallelism.tensor=3 is wrong; use parallelism.zero=0",
        "parallelism.zero=0 does not mend it",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_message_without_its_parts_is_complained_about(name, monkeypatch):
    message, words = PLANTED[name]
    monkeypatch.setattr(refusals, "refusal", lambda values: message if "parallelism.tensor=3" in values else "")
    assert complaint([*BASE, "parallelism.tensor=3"]).startswith(words)
    assert complaint([*BASE, "parallelism.tensor=2"]) == ""


def test_fixes_that_lead_in_a_circle_and_checks_that_crash_are_complained_about(monkeypatch):
    circle = {"1": "a.b=1 is odd; use a.b=2", "2": "a.b=2 is an even one; use a.b=1"}
    monkeypatch.setattr(refusals, "refusal", lambda values: circle[dict(each.split("=") for each in values)["a.b"]])
    assert complaint(["a.b=1"]).startswith("the fixes lead from one refusal to the other")

    def crash(values):
        raise AssertionError("not a ConfigError")

    monkeypatch.setattr(refusals, "refusal", crash)
    assert complaint(["a.b=1"]) == "the checks raised AssertionError: not a ConfigError"


# Found by the fuzz: each ended in a traceback of torch or of a rank, or its fix led nowhere.
FOUND = {
    "parallelism.tensor=4 parallelism.data=2 data.vocab_size=9 model.vocab_multiple=1": "parallelism.tensor=4 leaves a "
    "rank without any of the 9 rows of the embedding, whose gradients ZeRO reduces; use parallelism.tensor=1 or 2",
    "parallelism.tensor=4 parallelism.offload=cpu data.vocab_size=9 model.vocab_multiple=1": "parallelism.tensor=4 "
    "leaves a rank without any of the 9 rows of the embedding, whose gradients ZeRO reduces; use parallelism.tensor=1 "
    "or 2",
    "trainer.noise_scale=true parallelism.data=2 parallelism.zero=3 parallelism.zeropp.secondary=true": "trainer."
    "noise_scale=true observes the sums of gradients, which parallelism.zeropp.secondary=true replaces; use "
    "parallelism.zeropp.weights=none parallelism.zeropp.secondary=false parallelism.zeropp.gradients=none, or "
    "trainer.noise_scale=false",
    "trainer.noise_scale=true parallelism.data=2 optimizer=onebit_adam": "trainer.noise_scale=true observes the sums "
    "of gradients that optimizer=onebit_adam replaces; use trainer.noise_scale=false, or optimizer=adamw",
    "model.moe.experts=2 model.moe.top_k=3": "model.moe.top_k=3 is above model.moe.experts=2; use model.moe.top_k=2",
}


@pytest.mark.parametrize("changes", FOUND)
def test_what_the_fuzz_found_is_refused_with_a_fix(changes):
    values = replaced(changes.split())
    assert refusal(values) == FOUND[changes]
    assert complaint(values) == ""
    assert cause(refusal(values)) != cause(refusal(replaced(["parallelism.tensor=3"])))


def test_the_launcher_refuses_a_rank_without_rows_before_it_starts_any():
    values = "parallelism.tensor=4 parallelism.data=null data.vocab_size=9 model.vocab_multiple=1".split()
    config = load(replaced(values))
    assert check_here(config, None, ranks=4) == 4
    with pytest.raises(ConfigError, match="leaves a rank without any of the 9 rows"):
        check_here(config, None, ranks=8)


def test_ranks_without_rows_are_legal_where_nothing_reduces_them():
    assert refusal(replaced("parallelism.tensor=4 parallelism.data=1 data.vocab_size=9".split())) == ""
    with pytest.raises(ConfigError, match="not a key"):
        raise ConfigError(refusal(replaced(["optimizer.nesterov=true"])))
