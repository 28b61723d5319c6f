"""Checks the console's pages with axe-core (from npm), which has more rules than `accessible.js`."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ops.browser import Browser, browsing
from tests.ops.test_console import SHELF, TOKEN, serving
from tests.ops.test_console_browser import MARKDOWN
from tests.ops.test_workers_history import Watched
from tests.parts import LocalWorker

pytestmark = [pytest.mark.packaging, pytest.mark.registry("npm"), pytest.mark.timeout(400)]

#: The version, and the digest of its package, which npm prints.
AXE = "axe-core@4.14.1"
DIGEST = "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
#: Pages, and a CSS selector of an element that is there once the page is drawn.
PAGES = {
    "": "h1",
    "session/notes": ".switch",
    "session/fork": ".turn",
    "sessions": ".sessions td",
    "workers": ".log:not([hidden]) pre",
    "connect": ".examples pre",
    "models": ".models td",
    "nothing": "h1 + p",
}
RUN = (
    "axe.run().then((told) => { window.found = told.violations; }, (told) => { window.failed = `${told}`; });"
)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The JavaScript source of axe-core."""
    folder: Path = tmp_path_factory.mktemp("axe")
    done = subprocess.run(
        ["npm", "pack", "--json", AXE], cwd=folder, capture_output=True, text=True, check=True
    )
    (packed,) = json.loads(done.stdout)
    assert packed["integrity"] == DIGEST
    subprocess.run(["tar", "-xf", packed["filename"]], cwd=folder, check=True)
    return (folder / "package" / "axe.min.js").read_text()


def violations(browser: Browser, axe: str) -> list[str]:
    browser.run(f"window.found = window.failed = null; {axe}; {RUN}")
    assert not browser.wait_for("(found || failed) && [failed]")[0]
    found: list[dict[str, Any]] = browser.run("return found")
    return [f"{one['impact']}: {one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("dark", [False, True])
async def test_axe_finds_no_accessibility_violation_on_any_page(
    axe: str, local_worker: Callable[..., Awaitable[LocalWorker]], *, dark: bool
) -> None:
    client = (await local_worker()).client
    question = [{"role": "user", "content": "?"}]
    await client.session("notes").generate(messages=question, prefix=f"{MARKDOWN}> said `so`", max_tokens=3)
    await client.session("notes").fork("fork")
    other = await client.session("notes").fork("notes-v2", 0, tags=("variant",))  # so that there is a switch
    await other.generate(messages=question, max_tokens=3)

    found: dict[str, list[str]] = {}

    def look(url: str) -> None:
        with browsing() as browser:
            browser.open(url)
            browser.wait_for("document.querySelector('input[name=token]')")
            found["locked"] = violations(browser, axe)
            browser.open(f"{url}/?token={TOKEN}")
            for width in (400, 1200):
                browser.look(width, 900, dark=dark)
                for page, is_there in PAGES.items():
                    browser.run("location.hash = arguments[0]", f"#/{page}")
                    browser.wait_for("document.querySelector(arguments[0])", is_there)
                    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
                    found[f"{page} {width}"] = violations(browser, axe)
            browser.run("location.hash = '#/session/notes'")
            browser.click("Fork", "main button")
            browser.wait_for("document.querySelector('dialog').open")
            found["dialog"] = violations(browser, axe)

    SHELF.pulled.append("org/good")  # a bar of progress
    try:
        async with serving(client, Watched(60, "w1")) as url:
            await asyncio.to_thread(look, url)
    finally:
        SHELF.pulled.clear()
    assert {page: some for page, some in found.items() if some} == {}
