"""Holds a gateway's connections to workers: a client for each tenant and model, with its conversations."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .conversations import Conversations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from turnkeep_client.client import Client


class Connections:
    """The conversations of all tenants, with one model or several. Event loop only."""

    def __init__(
        self, connect: Callable[[str, str], Awaitable[Client]], models: Sequence[str], *, idle_s: float
    ) -> None:
        """`connect` returns the client of a tenant and a model; `models` is empty if there is only one model.

        Conversations idle for `idle_s` are removed.
        """
        #: Whether the server is shutting down; answers whose clients have disconnected go on then. Set before
        #: the first request.
        self.is_stopping: Callable[[], bool] = lambda: False
        #: The models' names; a single one may have the name ''.
        self.models = (*models,) or ("",)
        self._connect = connect
        self._idle_s = idle_s
        self._conversations: dict[tuple[str, str], Conversations] = {}  # by tenant and model
        self._connecting = asyncio.Lock()

    async def of(self, tenant: str, model: str) -> Conversations:
        """Return the conversations of a tenant with a model; connect first if needed."""
        async with self._connecting:
            made = self._conversations.get((tenant, model))
            if made is None or made.client.closed:  # credentials expire; a message may exceed a limit
                client = await self._connect(tenant, model)
                if made is not None:
                    await made.close()
                made = Conversations(client, idle_s=self._idle_s, is_stopping=self.is_stopping)
                self._conversations[tenant, model] = made
            return made

    @property
    def num_sessions(self) -> int:
        """The number of conversations that are known, of all tenants and models."""
        return sum(len(one.index.sessions) for one in self._conversations.values())

    async def close(self) -> None:
        """Close all connections. Workers complete the answers that run."""
        for conversations in self._conversations.values():
            await conversations.close()
