"""`turnkeep chat`: a conversation at a terminal, or line by line from a pipe."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from turnkeep_client.errors import InvalidMessageError, RequestFailedError, TurnkeepError
from turnkeep_client.messages import Generate
from turnkeep_client.session import build

from . import control
from .ask import decoded
from .exchanges import last_exchanges
from .screen import printable, wrapped
from .stream import stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import SessionInfo
    from turnkeep_client.session import Sampling

    from .exchanges import Exchange

_KEYS: Final = (
    "Enter sends. Ctrl-C stops an answer, or clears the line; a second one leaves. /help lists more."
)
_HELP: Final = """\
/system TEXT      say who the model is, from here on
/set              show the options of answers
/set NAME VALUE   change one; without VALUE it has its default again
/rewind [N]       take back the last exchange, or the last N
/info             position, KV, queue, and the worker's metrics
/bye              leave; the session stays (so does Ctrl-D)"""
_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "seed": int,
    "stop": lambda text: [text],
}
#: How long a command waits for the worker.
_PATIENCE_S: Final = 30.0
#: Characters of the last question and answer that are shown again.
_SHOWN: Final = 2000


async def chat(client: Client, name: str, system: str | None, sampling: Sampling) -> None:
    """Read lines and stream answers until the input ends. Raises `TurnkeepError` where it cannot begin."""
    build(Generate, **sampling)  # what is wrong with an option is said before a question is typed
    await _Chat(client, name, sampling).run(system)


class _Chat:
    def __init__(self, client: Client, name: str, sampling: Sampling) -> None:
        self._client = client
        self._session = client.session(name)
        self._name = name
        #: What is not given is left to the worker.
        self._defaults: dict[str, Any] = {
            option: value for option, value in sampling.items() if value not in (None, ())
        }
        self._sampling = self._defaults
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/help": self._help,
            "/system": self._system,
            "/set": self._set,
            "/rewind": self._rewind,
            "/info": self._info,
        }

    async def run(self, system: str | None) -> None:
        info = await self._begin()
        past = await last_exchanges(self._client, self._name) if info.position else []
        if sys.stdin.isatty():
            self._greet(info, past)
        elif info.position:
            _say(f"Going on with session {self._name!r} at position {info.position}.")
        if system and info.position:
            _say("The session goes on with the system message that it has; /system changes it from here on.")
        elif system:
            await self._system(system)
        async for line in _lines([one.question for one in past]):
            word, _, rest = line.partition(" ")
            if word == "/bye":
                return
            try:
                if word in self._commands:
                    await self._commands[word](rest.strip())
                elif word.startswith("/") and word[1:].isalpha():
                    _say(f"There is no command {word}; /help lists them, and a space before it sends it.")
                else:
                    await self._answer(line)
            except TurnkeepError as error:
                _say(f"turnkeep: {error}")

    async def _begin(self) -> SessionInfo:
        try:
            return await self._session.info()
        except RequestFailedError as error:
            if error.code != "unknown_session":
                raise
        await self._session.open()  # only that can use the name of a closed session again
        return await self._session.info()

    def _greet(self, info: SessionInfo, past: Sequence[Exchange]) -> None:
        where = f"session {self._name!r}, {info.position or 'no'} tokens"
        _say(f"{info.model} on {info.worker.device}, {where}.\n{_KEYS}\n")
        if past:
            _say(f"> {_end_of(past[-1].question)}\n{_end_of(past[-1].answer)}\n")
        if waiting := len(info.waiting) + (info.active is not None):
            _say(f"Requests of the session not answered yet: {waiting}. Yours waits for them.\n")

    async def _answer(self, question: str) -> None:
        generation = self._session.generate(
            messages=[{"role": "user", "content": question}], **self._sampling
        )
        answered = await stream(self._session, generation)
        if sys.stdin.isatty():
            is_cut = answered and generation.result.finish_reason == "length"
            _say("Ended at max_tokens, or where the context is full.\n" if is_cut else "")

    async def _help(self, _: str) -> None:
        _say(_HELP)

    async def _system(self, text: str) -> None:
        if not text:
            _say("/system wants a text, such as: /system Answer in one sentence.")
            return
        await self._session.append(messages=[{"role": "system", "content": text}], timeout_s=_PATIENCE_S)
        _say("The model is told so from here on.")

    async def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if not name:
            for option in _OPTIONS:
                _say(f"{option:<12} {self._sampling.get(option, 'none')}")
            return
        if name not in _OPTIONS:
            raise InvalidMessageError(f"there is no option {name!r}; there are {', '.join(_OPTIONS)}")
        changed = {option: kept for option, kept in self._sampling.items() if option != name}
        try:
            if value.strip():
                changed[name] = _OPTIONS[name](value.strip())
            elif name in self._defaults:
                changed[name] = self._defaults[name]
        except ValueError:
            raise InvalidMessageError(f"{value.strip()!r} is not valid; {name} is a number") from None
        build(Generate, **changed)
        self._sampling = changed

    async def _rewind(self, words: str) -> None:
        count = int(words or 1) if len(words) < 10 and (words.isdecimal() or not words) else 0
        if count < 1:
            raise InvalidMessageError(f"{words!r} is not valid; it must be a number of exchanges")
        past = await last_exchanges(self._client, self._name, count)
        if len(past) < count:
            raise InvalidMessageError(f"the session has {len(past)} exchanges, not {count}")
        start = past[-count].start
        if start is None:
            raise InvalidMessageError("the chat template has rewritten what was before; take back more of it")
        await self._session.rewind(start, timeout_s=_PATIENCE_S)
        _say(f"Taken back: {_end_of(past[-count].question)}")

    async def _info(self, _: str) -> None:
        await control.info(self._client, self._name, as_json=False)


async def _lines(past: Sequence[str]) -> AsyncIterator[str]:
    """Yield what the user types, without empty lines; a line that begins with a space keeps it."""
    if not sys.stdin.isatty():
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            if text := decoded(line).rstrip():
                yield text
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.output import create_output

    prompt: PromptSession[str] = PromptSession(
        history=InMemoryHistory([text for text in past if text]),
        output=create_output(always_prefer_tty=True),  # where the answers go into a pipe
    )
    is_leaving = False
    while True:
        try:
            line = await prompt.prompt_async("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_leaving and not prompt.default_buffer.text:
                return
            is_leaving = True
            _say("Ctrl-C again leaves.")
            continue
        is_leaving = False
        if line.strip():
            yield line.rstrip()


def _say(text: str) -> None:
    """Print what is no answer: aside, and paler on a terminal."""
    if sys.stderr.isatty():
        click.secho(wrapped(printable(text)), dim=True, err=True)
    else:
        click.echo(printable(text), err=True)


def _end_of(text: str) -> str:
    return text if len(text) <= _SHOWN else f"[...] {text[-_SHOWN:]}"
