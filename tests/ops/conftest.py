"""Fixtures of the tests of `ops`: the client of a worker in this process, a console for it, a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ops.browser import Browser, browsing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.ops.test_console import Page
    from tests.parts import LocalWorker
    from turnkeep_client.client import Client


@pytest.fixture
def client(worker: LocalWorker) -> Client:
    return worker.client


@pytest.fixture
async def page(client: Client) -> AsyncIterator[Page]:
    from tests.ops.test_console import opened

    async with opened(client) as page:
        yield page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        found.look(1200, 900)
        yield found
