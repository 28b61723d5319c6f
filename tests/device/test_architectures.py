"""The page of architectures says what the trials of a start find, in float32 and in 16 bits."""

from __future__ import annotations

import pytest
from architectures import PAGE, table


@pytest.mark.packaging
def test_the_page_says_how_each_architecture_is_served() -> None:
    """Its table is written by: python tests/device/architectures.py."""
    assert table() == [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
