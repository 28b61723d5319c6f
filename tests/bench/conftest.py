"""What every test of a bench needs."""

from collections.abc import Iterator

import pytest
from bench_runs import end_all


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A bench that a failed test left running is ended."""
    yield
    end_all()
