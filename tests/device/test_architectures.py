"""docs/architectures.csv matches the results of trials, in float32 and in 16 bits."""

from __future__ import annotations

import csv

import pytest
from architectures import TABLE, table


@pytest.mark.packaging
def test_the_table_of_architectures_in_the_docs_matches_the_results_of_their_trials() -> None:
    """If this fails, write the table again: python tests/device/architectures.py."""
    assert table() == [*csv.reader(TABLE.read_text().splitlines())]
