"""Record `turnkeep top` and `turnkeep console`: a real worker, conversations, what the commands show.

.venv/bin/python docs/record_top.py

Writes `docs/top.svg`, and with Chromium `docs/workers.png` and `docs/console.png`.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from record_demo import save

from ops.fleet import Fleet
from ops.screen import draw
from ops.top import WINDOW_S
from tests.ops.browser import browsing
from turnkeep_client import connect
from turnkeep_client.errors import NoWorkerError, TurnkeepError

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.session import Session

COLUMNS = 80
#: A small one, so that a minute of talk comes near it.
LIMITS = ("--max-disk", "64MiB")
WATCHED_S = 200.0
#: Of the browser's window.
PIXELS = (1200, 885)
#: A session with forks, which the picture of the console shows.
GARDEN = (
    "What grows well in the shade?",
    "How often should I water ferns?",
    "Name two flowers that bees like.",
)
QUESTIONS = ("Why is the sky blue?", "Name a flower.", "How do bees find it?", "Say that in one sentence.")


def main() -> None:
    """Run a worker, talk with it, and draw what top shows meanwhile."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        serve = [sys.executable, "-m", "commands", "serve", "--nats-port", str(port), "--data-dir", folder]
        with subprocess.Popen([*serve, "--worker", "garden", *LIMITS]) as worker:
            try:
                asyncio.run(_watch(port, Path(folder)))
            finally:
                worker.send_signal(signal.SIGTERM)


async def _watch(port: int, data_dir: Path) -> None:
    fleet = Fleet(300, window_s=WINDOW_S)
    async with await _client(port, data_dir) as client:
        await _ready(client)
        shows = ["console", "--nats-port", str(port), "--data-dir", str(data_dir), "--listen", "127.0.0.1:0"]
        console = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "commands", *shows), stderr=asyncio.subprocess.PIPE
        )
        url = (await console.stderr.readline()).split()[-1].decode() if console.stderr else ""
        await _garden(client)
        talks = [asyncio.create_task(_talk(client, f"s{number}")) for number in range(6)]

        async def listen() -> None:
            async for metrics in client.metrics():
                fleet.hear(metrics)

        listener = asyncio.create_task(listen())
        await asyncio.sleep(WATCHED_S)
        picture = draw(fleet.sightings(), [], columns=COLUMNS, title="turnkeep top  --prefix turnkeep")
        save(picture, Path(__file__).with_name("top.svg"), COLUMNS)
        await asyncio.to_thread(_photograph, f"{url}#/workers", "workers.png")
        await asyncio.to_thread(_photograph, f"{url}#/session/garden", "console.png")
        console.terminate()
        await console.wait()
        for task in (listener, *talks):
            task.cancel()
        await asyncio.gather(listener, *talks, return_exceptions=True)


async def _garden(client: Client) -> None:
    garden = client.session("garden")
    await garden.append(
        messages=[{"role": "system", "content": "You are a gardener. Answer in one sentence."}]
    )
    for question in GARDEN:
        await _ask(garden, question)
    code = [{"role": "user", "content": "Write a Python function that says how often to water a plant."}]
    await garden.generate(messages=code, prefix="```python\ndef", max_tokens=90, stop=["\n```"])
    roses = await garden.fork("garden-roses")
    await _ask(roses, "And roses?")
    await roses.fork("garden-roses-red")
    await garden.fork("garden-moss", 60)


async def _ask(session: Session, question: str) -> None:
    asked = [{"role": "user", "content": question}]
    await session.generate(messages=asked, max_tokens=120, repetition_penalty=1.1, stop=["."])


def _photograph(url: str, file: str) -> None:
    if shutil.which("chromedriver") is None:
        sys.stderr.write("no chromedriver is installed: the pictures of the console stay as they were\n")
        return
    with browsing() as browser:
        browser.look(*PIXELS)
        browser.open(url)
        time.sleep(3)
        browser.photograph(Path(__file__).with_name(file))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _client(port: int, data_dir: Path) -> Client:
    """Connect to the worker's own server as soon as that answers."""
    while True:
        try:
            token = (data_dir / "nats-token").read_text().strip()
            return await connect(f"nats://{token}@127.0.0.1:{port}")
        except (OSError, NoWorkerError):
            await asyncio.sleep(0.5)


async def _ready(client: Client) -> None:
    while True:
        try:
            await client.ask("ready", text="Hello", max_tokens=1)
        except NoWorkerError:
            await asyncio.sleep(0.5)
        else:
            return


async def _talk(client: Client, name: str) -> None:
    while True:
        for question in QUESTIONS:
            try:
                await client.session(name).generate(
                    messages=[{"role": "user", "content": question}], max_tokens=48
                )
            except TurnkeepError:
                return
            await asyncio.sleep(1.0)


if __name__ == "__main__":
    main()
