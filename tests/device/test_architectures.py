"""The table in docs/architectures.md matches the results of trials, in float32 and in 16 bits."""

from __future__ import annotations

import pytest
from architectures import PAGE, table


@pytest.mark.packaging
def test_the_table_of_architectures_in_the_docs_matches_the_results_of_their_trials() -> None:
    """If this fails, write the table again: python tests/device/architectures.py."""
    assert table() == [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
