"""A gateway whose NATS server has no connection left, or no room on its disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from apis import APIS
from parts import NatsServer

from turnkeep_client.client import connect

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process

HELLO = [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health"])
async def test_a_gateway_answers_503_with_the_reason_if_the_nats_server_has_no_connection_left(
    door: Any, tmp_path: Path, path: str
) -> None:
    """'No NATS server can be reached' would have its reader start another one."""
    (tmp_path / "full.conf").write_text("max_connections: 1")
    server = NatsServer(tmp_path / "store", ("-c", str(tmp_path / "full.conf")))
    server.start()
    try:
        async with connect(server.url), httpx2.AsyncClient(base_url=(await door(server.url)).url) as http:
            asking = http.get(path) if path == "/health" else http.post(path, json=APIS["chat"].body(HELLO))
            answer = await asking
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5")
            assert "the NATS server has no connection left" in answer.text
    finally:
        server.stop()
