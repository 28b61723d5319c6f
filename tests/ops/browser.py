"""Chromium without a window, driven by chromedriver as a user would: W3C's WebDriver protocol over HTTP."""

from __future__ import annotations

import base64
import shutil
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.parts import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The name under which the protocol gives elements.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
WAIT_S = 20.0


#: Returns the texts, placeholders and borders of fields that have too little contrast (WCAG 2.2, AA).
_CONTRAST = """
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
};
const over = (front, back) => back.map((one, i) => front[i] * front[3] / 255 + one * (1 - front[3] / 255));
const ground = (element) => element
    ? over(rgba(getComputedStyle(element).backgroundColor), ground(element.parentElement)) : [255, 255, 255];
const light = (color) => color.map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
const ratio = (front, back) => {
    const [low, high] = [light(over(rgba(front), back)), light(back)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
};
const found = [];
const check = (what, front, back, least) => {
    const got = ratio(front, back);
    if (got < least) found.push(`${what}: ${got.toFixed(2)}`);
};
for (const one of document.body.querySelectorAll('*')) {
    if (!one.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || one.disabled) continue;
    const style = getComputedStyle(one), back = ground(one);
    const colour = style.fill !== 'rgb(0, 0, 0)' ? style.fill : style.color;
    const text = [...one.childNodes].map((node) => node.nodeType === 3 ? node.data.trim() : '').join('');
    if (text) check(`${one.tagName} ${text.slice(0, 30)}`, colour, back, 4.5);
    if (one.placeholder) check(one.placeholder, getComputedStyle(one, '::placeholder').color, back, 4.5);
    if (one.matches('input, select, textarea:not(.composer textarea#message), .composer'))
        check(`border of ${one.className || one.type}`, style.borderTopColor, ground(one.parentElement), 3);
}
return found;
"""


class Browser:
    """A browser with one page. Blocking."""

    def __init__(self, http: httpx2.Client, session: str) -> None:
        self._http = http
        self._session = session

    def do(self, command: str, **given: Any) -> Any:
        answer = self._http.post(f"{self._session}/{command}", json=given).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, url: str) -> None:
        self.do("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.do("execute/sync", script=script, args=arguments)

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < deadline, f"{script}\n{self.text('body')}"
            time.sleep(0.05)
        return found

    def text(self, css: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def click(self, words: str, css: str = "button, a, summary") -> None:
        """Click what has these words."""
        self.do(f"element/{self._found(css, words)}/click")

    def type(self, css: str, keys: str) -> None:
        self.do(f"element/{self._found(css)}/value", text=keys)

    def _found(self, css: str, words: str = "") -> str:
        script = """[...document.querySelectorAll(arguments[0])].find((one) =>
            one.checkVisibility() && (!arguments[1] || one.innerText.trim() === arguments[1]))"""
        found = self.wait_for(script, css, words)
        self.run("arguments[0].scrollIntoView({ block: 'center' })", found)  # not below the page's header
        return str(found[_ELEMENT])

    def cdp(self, command: str, **given: Any) -> Any:
        return self.do("goog/cdp/execute", cmd=command, params=given)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the page, and whether its reader wants it dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])

    def faint(self) -> list[str]:
        """What has too little contrast on the page."""
        return list(self.run(_CONTRAST))

    def photograph(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.cdp("Page.captureScreenshot")["data"]))


@contextmanager
def browsing() -> Iterator[Browser]:
    """Run a browser with an empty profile; skips where there is none."""
    driver, program = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or program is None:
        pytest.skip("no Chromium with chromedriver is installed")
    port = free_port()
    quietly = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([driver, f"--port={port}"], **quietly) as process:
        http = httpx2.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, transport=httpx2.HTTPTransport(retries=8)
        )
        try:
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--lang=en"]
            options = {"goog:chromeOptions": {"binary": program, "args": flags}}
            made = http.post("/session", json={"capabilities": {"alwaysMatch": options}}).json()["value"]
            yield Browser(http, f"/session/{made['sessionId']}")
            http.delete(f"/session/{made['sessionId']}")
        finally:
            http.close()
            process.terminate()
