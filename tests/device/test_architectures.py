"""The page of architectures matches the trials at a start, in float32 and in 16 bits."""

from __future__ import annotations

import pytest
from architectures import PAGE, table


@pytest.mark.packaging
def test_the_table_of_architectures_in_the_docs_matches_the_results_of_their_trials() -> None:
    """Its table is written by: python tests/device/architectures.py."""
    assert table() == [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
