"""Types find mutations of collectives."""

import pytest

from certify.types.faults import report_of
from certify.types.mutations import MUTATIONS, UNSEEN


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name):
    cell, patches = MUTATIONS[name]
    report = report_of(patches, cell)
    assert report.passed == (name in UNSEEN), report.message
    assert "raises" not in report.message  # the mutation is silent in a run
