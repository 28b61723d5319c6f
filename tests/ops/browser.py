"""Controls a headless Chromium through chromedriver with user actions: W3C's WebDriver protocol over HTTP."""

import base64
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.parts import free_port

#: The name under which the protocol gives elements.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
WAIT_S = 60.0


#: A script with checks of what a page looks like.
_CHECKS = Path(__file__).with_name("accessible.js").read_text()
#: Roles that need a name, as Chromium computes them.
_NAMED = frozenset(
    {"button", "link", "textbox", "searchbox", "spinbutton", "combobox", "checkbox", "DisclosureTriangle"}
    | {"progressbar", "image", "dialog", "navigation"}
)


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
        """Wait until a JavaScript expression is true; return its value."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < deadline, f"{script}\n{self.text('body')}"
            time.sleep(0.05)
        return found

    def text(self, css: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css))

    def click(self, words: str, css: str = "button, a, summary") -> None:
        """Click the visible element with exactly this text; `css` selects the elements to search."""
        self._act("click", css, words)

    def type(self, css: str, keys: str) -> None:
        self._act("value", css, text=keys)

    def _act(self, action: str, css: str, words: str = "", **given: Any) -> None:
        """Send a WebDriver action to an element; search again if the page has replaced the element."""
        for number in range(3):
            try:
                self.do(f"element/{self._found(css, words)}/{action}", **given)
            except AssertionError as error:
                if "stale element reference" not in str(error) or number == 2:
                    raise
            else:
                return

    def _found(self, css: str, words: str = "") -> str:
        script = """((css, words) => {
            const found = [...document.querySelectorAll(css)].find((one) =>
                one.checkVisibility() && (!words || one.innerText.trim() === words));
            found?.scrollIntoView({ block: 'center' });  // not below the page's header
            return found;
        })(arguments[0], arguments[1])"""
        return str(self.wait_for(script, css, words)[_ELEMENT])

    def cdp(self, command: str, **given: Any) -> Any:
        return self.do("goog/cdp/execute", cmd=command, params=given)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the page in pixels, and whether the user prefers a dark colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """Press a key; the focused element gets it."""
        keys = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.do("actions", actions=[{"type": "key", "id": "keyboard", "actions": keys}])

    def faults(self) -> list[str]:
        """Return accessibility faults of the page: contrast, order of headings, controls without a name."""
        nodes = self.cdp("Accessibility.getFullAXTree")["nodes"]
        roles = [
            one["role"]["value"]
            for one in nodes
            if not (one["ignored"] or one.get("name", {}).get("value", "").strip())
        ]
        unnamed = [f"{role} without a name" for role in roles if role in _NAMED]
        return [*self.run(_CHECKS, "contrast"), *self.run(_CHECKS, "outline"), *unnamed]

    def unreached(self) -> list[str]:
        """Move through the page by Tab; return controls that are not reached, or whose focus is invisible."""
        rest, found = self.run(_CHECKS, "controls"), []
        for _ in range(2 * len(rest) + 5):
            self.press("\ue004")
            if (at := self.run(_CHECKS, "focus")) is not None:
                rest = [one for one in rest if one != at[0]]
                found += at[1]
            if not rest:
                break
        outer = "return arguments[0].outerHTML.slice(0, 80)"
        return found + [f"not reached: {self.run(outer, one)}" for one in rest]

    def photograph(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.cdp("Page.captureScreenshot")["data"]))


@contextmanager
def browsing() -> Iterator[Browser]:
    """Run a browser with an empty profile; skip the test if no browser is installed."""
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
