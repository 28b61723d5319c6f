"""Chats of `examples/` in a browser: reloads in mid-answer, and kills of worker, gateway and pages."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
from forked import Forked
from parts import free_port, until

from tests.ops.browser import Browser, browsing
from turnkeep_client.messages import Generated, decode_result

pytestmark = [pytest.mark.packaging, pytest.mark.process]


EXAMPLE = Path(__file__).parents[2] / "examples" / "nextjs"
ANSWER = "document.querySelector('p.assistant')?.textContent"
NUM_TOKENS = 12_000


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install and build the example."""
    folder = tmp_path / "nextjs"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", ".next"))
    environment = {**os.environ, "NEXT_TELEMETRY_DISABLED": "1"}
    for command in (["install", "--no-package-lock", "--no-audit", "--no-fund"], ["run", "build"]):
        done = subprocess.run(
            ["npm", *command], cwd=folder, env=environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@contextmanager
def running(site: Path, port: int, url: str) -> Iterator[None]:
    """Run the site with the gateway at `url`; kill all of its processes in the end."""
    command = ["node", "node_modules/next/dist/bin/next", "start", "-H", "127.0.0.1", "-p", str(port)]
    given = {"GATEWAY": f"{url}/v1", "MAX_TOKENS": str(NUM_TOKENS), "NEXT_TELEMETRY_DISABLED": "1"}
    with (site / "next.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=site, env={**os.environ, **given}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            while True:
                assert process.poll() is None, (site / "next.log").read_text()
                assert time.monotonic() < deadline
                try:
                    assert http.get("/").status_code == 200
                    break
                except httpx2.TransportError:
                    time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.registry("npm")
@pytest.mark.timeout(900)
def test_the_nextjs_chat_completes_its_answer_despite_page_reloads_and_kills_of_every_server(
    worker_process: Any, endless_model: Path, site: Path, tmp_path: Path
) -> None:
    """Each reload resumes the answer by `useChat({ resume: true })`; the complete answer is saved."""
    worker = worker_process(model=endless_model)
    worker.start()
    asyncio.run(until_ready(worker))
    port, own_port = free_port(), free_port()
    command = ["-m", "commands", "gateway", "--listen", str(port)]
    environment = {**os.environ, "TURNKEEP_NATS": worker.url}

    def saved() -> list[Any]:
        found: list[Any] = json.loads((site / "chats" / "first.json").read_text())
        return found

    gateway = Forked.logging_to(tmp_path / "gateway.log", command, environment)
    try:
        with browsing() as browser:
            with running(site, own_port, f"http://127.0.0.1:{port}"):
                browser.open(f"http://127.0.0.1:{own_port}/")
                browser.type("input", "Hello.")
                browser.click("Send")
                browser.wait_for(f"{ANSWER}?.length > 20")
                browser.do("refresh")
                browser.wait_for(f"{ANSWER}?.length > 100")
                worker.kill()
                worker.start()
                browser.wait_for(f"{ANSWER}.length > 200")
            gateway.kill()
            gateway.wait()
            assert [one["role"] for one in saved()] == ["user"], "it was in the middle"
            gateway = Forked.logging_to(tmp_path / "gateway.log", command, environment)
            with running(site, own_port, f"http://127.0.0.1:{port}"):
                browser.do("refresh")
                browser.wait_for("document.querySelector('#status')?.textContent === 'streaming'")
                browser.wait_for("document.querySelector('#status')?.textContent === 'ready'")
                shown = browser.run(f"return {ANSWER}")
                browser.do("refresh")
                browser.wait_for(f"{ANSWER}?.length === arguments[0]", len(shown))
    finally:
        gateway.kill()
        gateway.wait()
    (result,) = asyncio.run(recorded(worker))
    assert len(result.tokens) == NUM_TOKENS
    assert shown == result.text
    said, answered = saved()
    assert (said["parts"][0]["text"], answered["role"]) == ("Hello.", "assistant")
    assert "".join(part.get("text", "") for part in answered["parts"]) == result.text


EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED = "JSON.parse(sessionStorage.getItem('asked'))"
LONG_TOKENS = 5000


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


def test_the_web_page_shows_the_whole_answer_despite_page_reloads_and_kills_of_worker_and_gateway(
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
            browser.open(f"{page}?gateway=http://127.0.0.1:{port}&max_tokens={LONG_TOKENS}")
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
    assert len(result.tokens) == LONG_TOKENS
    assert json.loads(browser.run("return sessionStorage.getItem('asked')"))["text"] == result.text
    assert browser.run("return document.querySelector('#answer').textContent") == result.text
    assert browser.text("#state") == "done"


async def until_ready(process: Any) -> None:
    await until(lambda: '"event": "ready"' in process.log)


async def recorded(process: Any) -> list[Generated]:
    async with await process.client() as client:
        results = [decode_result(one.body) for one in await client.log() if one.kind == "out"]
    return [one for one in results if isinstance(one, Generated)]
