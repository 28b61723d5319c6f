"""`turnkeep top`: shows the workers of a subject prefix live on a terminal, from their metrics messages.

Owns the terminal and the tasks; `screen` draws, `fleet` keeps the messages. Sends requests only while a
session is open on the screen: one `info` a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import termios
import tty
from typing import TYPE_CHECKING, Final, NoReturn

from rich.console import Console
from rich.live import Live

from turnkeep_client.errors import NotPermittedError, TurnkeepError

from .concurrency import until_one_ends
from .fleet import Fleet, Gateways
from .screen import State, draw, names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from turnkeep_client.client import Client
    from turnkeep_client.messages import SessionInfo

#: The time that rates and percentiles cover, and the time for which silent workers are still shown.
WINDOW_S: Final = 60.0
_FORGET_S: Final = 300.0
_DRAW_S: Final = 0.5
_LOOK_S: Final = 1.0
_CLOSED: Final = "the NATS server has closed the connection; its log says why"

_KEYS: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
}


async def run(client: Client, title: str) -> None:
    """Show the workers until the user types `q`. Raises `TurnkeepError` without a terminal or connection."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise TurnkeepError("top needs a terminal; turnkeep info --json prints one metrics message")
    top = _Top(client, title)
    with _typing(top.press):
        # The first task ends after `q`, with the connection, or with a fault.
        await until_one_ends(top.listen(), top.listen_to_gateways(), top.look(), top.draw())


class _Top:
    """Redraws the screen after a key or a metrics message; owns the screen's state. Event loop only."""

    def __init__(self, client: Client, title: str) -> None:
        self._client = client
        self._title = title
        self._fleet = Fleet(_FORGET_S, window_s=WINDOW_S)
        self._gateways = Gateways()
        self._state = State()
        self._session: SessionInfo | str = ""
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()

    def press(self, typed: str) -> None:
        for key in keys(typed):
            before = self._state.session
            self._state.press(key, names(self._state.rows(self._fleet.sightings())))
            if self._state.session != before:
                self._session = "asking ..."
                self._opened.set()
        self._changed.set()

    async def listen(self) -> NoReturn:
        async for metrics in self._client.metrics():
            self._fleet.hear(metrics)
            self._changed.set()
        raise TurnkeepError(_CLOSED)

    async def listen_to_gateways(self) -> NoReturn:
        try:
            async for metrics in self._client.gateways():
                self._gateways.hear(metrics)
        except NotPermittedError:
            await asyncio.Event().wait()  # so gateways are not shown
        raise TurnkeepError(_CLOSED)

    async def look(self) -> NoReturn:
        while True:
            if name := self._state.session:
                found = await self._info(name)
                if name == self._state.session:
                    self._session = found
                    self._changed.set()
            self._opened.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._opened.wait()

    async def _info(self, name: str) -> SessionInfo | str:
        try:
            return await self._client.session(name).info()
        except TurnkeepError as error:
            return str(error)

    async def draw(self) -> None:
        console = Console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not self._state.left:
                self._changed.clear()
                state = "" if self._client.connected else "  (no connection to NATS)"
                picture = draw(
                    self._state,
                    self._fleet.sightings(),
                    self._gateways.now(),
                    self._session,
                    size=(console.size.width, console.size.height),
                    title=self._title + state,
                )
                live.update(picture, refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DRAW_S):  # ages grow, and the terminal may change its size
                        await self._changed.wait()


def keys(typed: str) -> list[str]:
    """Split a terminal's input into keys: single characters, or names such as `up`."""
    found = re.findall(r"\x1b[\[O][0-9;]*[A-Za-z~]|[\s\S]", typed)
    return [_KEYS.get(one, one) for one in found if one in _KEYS or one.isprintable()]


@contextlib.contextmanager
def _typing(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` with typed keys at once, while the block runs; the terminal does not echo them."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(terminal, 1024)
        if not typed:  # the terminal is gone
            loop.remove_reader(terminal)
        press(typed.decode(errors="ignore") if typed else "q")

    # Without `TCSADRAIN` keys that were typed before would be dropped.
    tty.setcbreak(terminal, termios.TCSADRAIN)
    mode = termios.tcgetattr(terminal)
    # Disable Ctrl-Z: the shell would get a terminal without echo that still shows this screen.
    mode[6][termios.VSUSP] = os.fpathconf(terminal, "PC_VDISABLE").to_bytes(1, "big")
    termios.tcsetattr(terminal, termios.TCSADRAIN, mode)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
