"""The page of `examples/` that survives a reload, in a browser, with kills of worker and gateway."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from forked import Forked
from parts import free_port

from tests.ops.browser import browsing
from turnkeep_client.messages import Generated, decode_result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ops.browser import Browser

EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED = "JSON.parse(sessionStorage.getItem('asked'))"
NUM_TOKENS = 5000

pytestmark = [pytest.mark.packaging, pytest.mark.process]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(EXAMPLES)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}/reload.html"
    server.shutdown()
    server.server_close()


def test_an_answer_survives_page_reloads_and_kills_of_worker_and_gateway(
    worker_process: Any, endless_model: Path, page: str, tmp_path: Path
) -> None:
    process = worker_process(model=endless_model)
    process.start()
    port = free_port()
    command = ["-m", "commands", "gateway", "--listen", str(port)]
    environment = {**os.environ, "TURNKEEP_NATS": process.url}
    asyncio.run(until_ready(process))
    gateway = Forked.logging_to(tmp_path / "gateway.log", command, environment)
    try:
        with browsing() as browser:
            browser.open(f"{page}?gateway=http://127.0.0.1:{port}&max_tokens={NUM_TOKENS}")
            browser.click("Ask")
            browser.wait_for(f"{ASKED}?.text.length > 20")
            browser.do("refresh")
            browser.wait_for(f"{ASKED}.text.length > 100")
            process.kill()
            process.start()
            browser.wait_for(f"{ASKED}.text.length > 200")
            gateway.kill()
            gateway.wait()
            browser.do("refresh")
            assert not browser.run(f"return {ASKED}.done"), "it was in the middle"
            gateway = Forked.logging_to(tmp_path / "gateway.log", command, environment)
            browser.wait_for(f"{ASKED}.done")
            _check(browser, asyncio.run(recorded(process)))
    finally:
        gateway.kill()
        gateway.wait()


def _check(browser: Browser, recorded: list[Generated]) -> None:
    (result,) = recorded
    assert len(result.tokens) == NUM_TOKENS
    assert json.loads(browser.run("return sessionStorage.getItem('asked')"))["text"] == result.text
    assert browser.run("return document.querySelector('#answer').textContent") == result.text
    assert browser.text("#state") == "done"


async def until_ready(process: Any) -> None:
    async with asyncio.timeout(60):
        while '"event": "ready"' not in process.log:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def recorded(process: Any) -> list[Generated]:
    async with await process.client() as client:
        results = [decode_result(one.body) for one in await client.log() if one.kind == "out"]
    return [one for one in results if isinstance(one, Generated)]
