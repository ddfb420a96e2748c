"""Models that read samples: memory and collectives as real ranks have them, and plans with nothing written for them."""

import pytest
from marking import marked

from plan.test_memory import wrong_twice
from plan.truth_layouts import Layout

QUICK = [
    Layout(1, "norm=batch", "resnet"),
    Layout(2, "norm=batch zero=3 micro=2", "resnet"),
    Layout(2, "norm=group pp=2", "resnet"),
    Layout(2, "zero=3", "perceptron"),
]
SLOW = [
    *(Layout(2, f"norm=group {words}", "resnet") for words in ("zero=2", "zero=3", "pp=2 schedule=zero_bubble")),
    *(Layout(2, f"norm=batch {words}", "resnet") for words in ("zero=2", "pp=2", "pp=2 schedule=zbv", "zero=1 recompute=full")),
    Layout(1, "norm=group", "resnet"),
    Layout(1, "norm=batch dtype=bf16", "resnet"),
    Layout(2, "norm=group zero=2 bucket=3", "resnet"),
    Layout(4, "norm=batch pp=2 zero=3", "resnet"),
    *(Layout(1, f"form={form}", "perceptron") for form in ("sequential", "listed", "whole")),
    *(Layout(2, f"form={form} zero={zero}", "perceptron") for form in ("listed", "whole") for zero in (2, 3)),
    Layout(2, "zero=2", "perceptron"),
    Layout(2, "pp=2", "perceptron"),
]


@pytest.mark.parametrize("layout", marked([*QUICK, *SLOW], quick=len(QUICK), slow=len(SLOW)), ids=lambda each: f"{each.model} {each.name}")
def test_memory_and_collectives_are_those_of_real_ranks(layout):
    assert wrong_twice([layout]) == []
