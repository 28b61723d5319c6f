"""Workers with a raw connection beside them, and models with other chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from raw_wire import Wire

from turnkeep_client.nats_client import Nats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


@pytest.fixture
async def quiet_wire(
    local_worker: Callable[..., Awaitable[Any]], nats_url: str
) -> AsyncIterator[Callable[..., Awaitable[Wire]]]:
    """Start a worker with these settings and a raw connection to it; its log may lose entries."""
    made: list[Wire] = []

    async def start(**settings: Any) -> Wire:
        worker = await local_worker(**settings)
        nc = Nats()  # nats-py's own goes deaf at some of what is published here
        await nc.connect(nats_url)
        made.append(Wire(nc, worker))
        await made[-1].listen()
        return made[-1]

    yield start
    for one in made:
        await one.nc.close()


@pytest.fixture
async def wire(quiet_wire: Callable[..., Awaitable[Wire]]) -> AsyncIterator[Callable[..., Awaitable[Wire]]]:
    """Start a worker with these settings and a raw connection to it; the log is checked after the test."""
    made: list[Wire] = []

    async def start(**settings: Any) -> Wire:
        made.append(await quiet_wire(**settings))
        return made[-1]

    yield start
    for one in made:
        await one.check_log()


@pytest.fixture
def strict_model(model_with_template: Callable[[str, str], Path]) -> Path:
    """A model whose template refuses roles that it does not know, and messages with one word."""
    knows = "{% if m['role'] not in ['user', 'assistant'] or 'sesame' in m['content'] %}"
    refuse = "{{ raise_exception('only user and assistant may speak') }}{% endif %}"
    return model_with_template(
        "strict", "{% for m in messages %}" + knows + refuse + "{{ m['content'] }};{% endfor %}"
    )
