"""Fixtures that start gateways on loopback in this process, with OpenAI's client and an HTTP client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import pytest
from crafted import TEXT
from openai import AsyncOpenAI
from parts import make_tiny_model

from gateway.app import Gateway
from gateway.keys import Keys
from ops.http_server import listening, serve, server, url_of
from tests.at_rest import come_to_rest
from turnkeep_client.client import Client, connect


class Door:
    """A running gateway: its URL, its index of sessions, and clients for it: OpenAI's, and one of HTTP."""

    def __init__(self, gateway: Gateway, server: Any, task: asyncio.Task[None], url: str) -> None:
        self.gateway = gateway
        self.server = server
        self.task = task
        self.url = url
        self.worker: Any = None  # set for the fixture `worker`
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.http = httpx2.AsyncClient(base_url=url, timeout=60)

    @property
    def index(self) -> Any:
        return self.gateway.connections._conversations["default", ""].index

    async def come_to_rest(self) -> None:
        """Assert that the gateway holds nothing of requests any more, unless answers go on."""
        running = [one for made in self._made for one in made.index.sessions.values() if one.num_running]
        await come_to_rest(self.gateway, is_busy=lambda: bool(running))

    @property
    def _made(self) -> list[Any]:
        return [*self.gateway.connections._conversations.values()]

    async def stop(self) -> None:
        """Stop the gateway without waiting for answers, which the worker continues."""
        await self.openai.close()
        await self.http.aclose()
        self.server.config.timeout_graceful_shutdown = 0
        self.server.should_exit = True
        await self.task


@pytest.fixture
async def door() -> AsyncIterator[Callable[..., Awaitable[Door]]]:
    """Return a function that starts a gateway for a NATS URL and a subject prefix, or `prefixes` by model.

    All gateways are stopped after the test.
    """
    started: list[Door] = []

    async def start(
        url: str,
        prefix: str = "turnkeep",
        *,
        keys: Keys | None = None,
        idle_s: float = 3600.0,
        prefixes: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> Door:
        async def connected(tenant: str, model: str) -> Client:
            return await connect(url, prefix=prefixes.get(model, prefix), tenant=tenant)

        gateway = Gateway(connected, keys or Keys(), models=[*prefixes], idle_s=idle_s, **options)
        listener = listening("127.0.0.1", 0)
        running = server(gateway.app, 10)

        async def served() -> None:
            async with gateway.open(lambda: running.should_exit):
                await serve(running, listener, gateway.publish())

        started.append(Door(gateway, running, asyncio.create_task(served()), url_of(listener)))
        return started[-1]

    yield start
    for one in started:
        if not one.task.done():
            await one.come_to_rest()
            await one.stop()


@pytest.fixture(scope="session")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has one token with the text of a whole call, and one with its beginning."""
    from transformers import AutoTokenizer

    folder = make_tiny_model(tmp_path_factory.mktemp("calling") / "calling", vocab_size=261)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.add_tokens([TEXT, TEXT[:40]]) == 2
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def gateway(worker: Any, door: Any) -> Callable[..., Awaitable[Door]]:
    """Return a function that starts a gateway for the fixture `worker`, with these options."""

    async def start(**options: Any) -> Door:
        started: Door = await door(worker.settings.nats, worker.settings.prefix, **options)
        started.worker = worker
        return started

    return start


@pytest.fixture
async def served(gateway: Any) -> Any:
    """A gateway for the fixture `worker`."""
    return await gateway()


@pytest.fixture
def http(served: Any) -> httpx2.AsyncClient:
    """An HTTP client for the gateway that the fixture `served` starts."""
    return served.http  # type: ignore[no-any-return]
